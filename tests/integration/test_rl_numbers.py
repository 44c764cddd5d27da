"""The numbers of whole RL runs: one seed is one run, and an unchanged policy is what was sampled from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.layout import RunFolder
from tests.support.runs import Command, run_environment

_MODEL = Path(__file__).parents[2] / "configs" / "debug" / "model"
_SECONDS = 240.0

_CONFIG = """
run_name = "rl"
max_steps = 4
seq_len = 320
micro_batch_size = 4
export = {{}}

[model]
name = "{model}"

[deployment]
num_threads = 1

[optimizer]
type = "adamw"
lr = 1e-3

[[sources]]
environment = "sort-letters"
settings = {{ min_length = 3, max_length = 3, alphabet = "abcdefgh" }}

[[sources]]
environment = "tests.support.environments:Rounds"
settings = {{ min_length = 3, max_length = 3, alphabet = "abcdefgh" }}
num_workers = 2

[sampling]
max_tokens = 8

[rollout]
group_size = 4
groups_per_batch = 4
max_lead = 0

[inference]
num_threads = 1
engine = {{ type = "embedded", max_batch = 12 }}

[evaluation]
num_tasks = 4
interval = 2
num_printed = 0

[[evaluation.sources]]
environment = "sort-letters"
settings = {{ split = "test", min_length = 3, max_length = 3, alphabet = "abcdefgh" }}

[ckpt]
interval = 2
"""

# What tells of the clock, or of what else the machine does. Every other number belongs to the seed.
_OF_THE_CLOCK = ("time", "step_seconds", "tokens_per_second", "eta_seconds", "mfu", "memory_bytes")
_OF_THE_CLOCK_PREFIXES = ("time/", "rate/")


def _run(root: Path, *flags: str) -> RunFolder:
    """A whole run by the command, to its end."""
    root.mkdir()
    config = root / "rl.toml"
    config.write_text(_CONFIG.format(model=_MODEL))
    words = [sys.executable, "-m", "launcher.rl", "@", str(config), "--output-dir", str(root), *flags]
    environment = {**run_environment(root / "cache"), "PYTHONPATH": str(Path(__file__).parents[2])}
    finished = Command(words, environment, root).wait(_SECONDS)
    assert finished.code == 0, finished.output
    return RunFolder(root / "rl")


def _records(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def _steps(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for record in _records(folder) if "loss" in record]


def _numbers(folder: RunFolder) -> list[dict[str, Any]]:
    """The metrics without those of the clock."""
    return [
        {
            name: value
            for name, value in record.items()
            if name not in _OF_THE_CLOCK and not name.startswith(_OF_THE_CLOCK_PREFIXES)
        }
        for record in _records(folder)
    ]


def _traces(folder: RunFolder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.rollouts.iterdir()}
