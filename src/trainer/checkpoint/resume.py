"""Which checkpoint a run goes on from, and what of it is loaded. Decided on rank 0, so that all ranks load
one step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from contract.choice import choose_checkpoint
from contract.layout import RunFolder
from contract.record import CommitRecord
from contract.store import Folder
from trainer.checkpoint.agreement import on_all_ranks
from trainer.checkpoint.reader import read_config, read_values
from trainer.checkpoint.storage import COMPONENT
from trainer.config.checkpoint import ResumeConfig
from trainer.parallel.process import Process

SKIP_FLAGS = {
    "optimizer": "skip_optimizer",
    "schedule": "skip_scheduler",
    "progress": "skip_progress",
    "data": "skip_data",
}
"""The flag of `resume` that leaves a part out."""

_NOT_STATE = ("resume", "clean", "servers", "server_key", "channel")
"""Keys of the configuration that say how a run starts and whom it talks to, not what it is; addresses and
ports may be other ones at every start, as `rl` chooses those that are not set. A key of a server is no
business of whoever gets a checkpoint.
"""

_SHOWN_CHANGES = 12


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What `CheckpointManager.load` will do.

    Attributes:
        saved_parts: names of the parts that the checkpoint holds.
        skipped: parts left out because a flag of `resume` says so.
        warnings: newer steps that cannot be used, and why.
        changes: settings that differ from those of the run that wrote it, `key: old -> new`.
    """

    step: int
    path: Folder
    record: CommitRecord
    saved_parts: tuple[str, ...]
    skipped: tuple[str, ...]
    warnings: tuple[str, ...]
    changes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The plan in words, for the start-up summary."""
        loaded = [name for name in self.saved_parts if name not in self.skipped]
        lines = [f"resumes step {self.step} of {self.path} (written by {_count(self.record.world_size)})"]
        lines.append(f"loads {', '.join(loaded)}")
        if self.skipped:
            lines.append(f"starts afresh: {', '.join(self.skipped)}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.changes:
            lines.append(f"settings changed since: {'; '.join(self.changes)}")
        return lines


def plan_resume(
    resume: ResumeConfig,
    folder: RunFolder,
    process: Process,
    resolved_config: Mapping[str, Any],
    *,
    companions: Collection[str] = (),
) -> ResumePlan | None:
    """Choose the step and say what of it will be loaded; collective, loads nothing.

    Returns:
        None if this run was begun but died before its first checkpoint: it then starts at step 0, so that one
        command (`--resume`) can always be repeated.

    Args:
        resolved_config: the configuration of this run, JSON values.
        companions: other processes whose state must be in the step, unless `resume.skip_data` leaves it out.

    Raises:
        CheckpointError: there is nothing to resume, or what `resume` names cannot be loaded; raised on every
            rank.
    """
    components = (COMPONENT, *(() if resume.skip_data else companions))
    plans = on_all_ranks(
        process.control_group,
        "cannot resume",
        lambda: _plan(resume, folder, resolved_config, components) if process.is_main else None,
    )
    return plans[0]


def state_config(resolved_config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that belongs to the run's state, and is stored in its checkpoints."""
    return {key: value for key, value in resolved_config.items() if key not in _NOT_STATE}


def _plan(
    resume: ResumeConfig, folder: RunFolder, resolved_config: Mapping[str, Any], components: Collection[str]
) -> ResumePlan | None:
    chosen = choose_checkpoint(folder, step=resume.step, place=resume.dir, components=components)
    if chosen is None:
        return None
    path = chosen.entry.path
    skipped = tuple(part for part, flag in SKIP_FLAGS.items() if getattr(resume, flag))
    return ResumePlan(
        step=chosen.entry.step,
        path=path,
        record=chosen.record,
        saved_parts=tuple(read_values(path)),
        skipped=skipped,
        warnings=chosen.warnings,
        changes=_changes(state_config(read_config(path)), state_config(resolved_config)),
    )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    old, new = _flatten(before), _flatten(now)
    changed = [
        key for key in sorted(old.keys() | new.keys()) if old.get(key, "unset") != new.get(key, "unset")
    ]
    told = [f"{key}: {old.get(key, 'unset')} -> {new.get(key, 'unset')}" for key in changed[:_SHOWN_CHANGES]]
    return (*told, f"{len(changed) - _SHOWN_CHANGES} more") if len(changed) > _SHOWN_CHANGES else tuple(told)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _count(world_size: int) -> str:
    return "1 process" if world_size == 1 else f"{world_size} processes"
