"""Readable traces: one JSON object per episode, in `rollouts/step_N.jsonl` and `eval_version_N.jsonl`.

A file appears under its name only when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from contract.errors import RunFolderError

if TYPE_CHECKING:
    from orchestrator.episode import Episode


_NAME = re.compile(r"(?:step|eval_version)_(\d+)\.jsonl(?:\.partial)?")


def trace_path(rollouts: Path, step: int) -> Path:
    """What batch `step` was trained on."""
    return rollouts / f"step_{step}.jsonl"


def evaluation_path(rollouts: Path, version: int) -> Path:
    """The evaluation that began with `version`."""
    return rollouts / f"eval_version_{version}.jsonl"


def describe_episode(episode: Episode) -> dict[str, Any]:
    """What every trace says of an episode. `versions` are the oldest and newest that sampled a token;
    `num_tokens` is how many they sampled.
    """
    return {
        "reward": episode.reward,
        "rewards": dict(episode.rewards),
        "num_turns": episode.num_turns,
        "truncated": episode.is_truncated,
        "finish_reason": episode.finish_reason,
        "versions": [episode.oldest_version, episode.newest_version],
        "num_tokens": episode.num_sampled,
        "messages": episode.messages,
    }


def read_trace(path: Path) -> list[dict[str, Any]]:
    """What `write_trace` wrote; empty if there is no such file.

    Raises:
        RunFolderError: the file cannot be read, or is no trace.
    """
    try:
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise RunFolderError(f"cannot read the trace {path}: {error}") from error


def write_trace(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one object a line, replacing an older file.

    Raises:
        RunFolderError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            for row in rows:
                file.write(msgspec.json.encode(row) + b"\n")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise RunFolderError(f"cannot write the trace {path}: {error.strerror}") from error


def remove_later(rollouts: Path, step: int) -> None:
    """Remove the traces of batches and evaluations after `step`, from which the run goes on: nobody may take
    them for its own.

    Raises:
        RunFolderError: one cannot be removed.
    """
    try:
        for path in rollouts.iterdir() if rollouts.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match is not None and int(match[1]) > step:
                path.unlink()
    except OSError as error:
        raise RunFolderError(
            f"{error.filename}, a trace of a step that is done again, cannot be removed: {error.strerror}; "
            "give yourself the right to, or choose another run_name"
        ) from error
