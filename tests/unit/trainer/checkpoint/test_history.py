"""Checkpoints of a history that a run has left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from contract.commit import inspect_step, scan_superseded
from contract.errors import CheckpointError
from contract.layout import RunFolder
from tests.support.resume import planned
from tests.unit.trainer.checkpoint.test_manager import (
    CONFIG,
    committed,
    load,
    make_manager,
    make_parts,
    save_now,
)
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.storage import LocalStorage
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.parallel.process import Process


def test_steps_of_this_folder_are_set_aside_and_not_pruned_when_another_run_is_resumed_into_it(
    folder: RunFolder, process: Process, tmp_path: Path
) -> None:
    other = RunFolder(tmp_path / "other")
    make_manager(other, process).save(6)
    manager = make_manager(folder, process)
    for step in (2, 4):
        manager.save(step)
    resumed = make_manager(folder, process, keep_last=2)
    plan = planned(ResumeConfig(dir=str(other.checkpoints / "step_6")), folder, process, CONFIG)
    resumed.load(plan)
    resumed.save(7)
    assert committed(folder) == [7]
    assert [inspect_step(folder.checkpoints / "superseded" / f"step_{step}").state for step in (2, 4)] == [
        "committed",
        "committed",
    ]


def test_a_history_that_cannot_be_moved_away_stops_the_save_and_stays(
    folder: RunFolder, process: Process
) -> None:
    manager = make_manager(folder, process)
    for step in (2, 4):
        manager.save(step)
    (folder.checkpoints / "superseded").write_text("a file in the way")
    resumed = load(folder, process, make_parts(), step=2)
    with pytest.raises(CheckpointError, match="cannot be moved out of the way"):
        save_now(resumed, 3)
    assert committed(folder) == [2, 4]


class BusyStorage(LocalStorage):
    """Cannot move step `busy_step`, if it is asked for the first time."""

    def __init__(self, checkpoints: Path, busy_step: int) -> None:
        super().__init__(checkpoints)
        self._busy_step: int | None = busy_step

    def set_aside(self, step: int) -> str | None:
        if step == self._busy_step:
            self._busy_step = None
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return super().set_aside(step)


def test_the_next_save_moves_away_what_is_left_of_a_history_that_was_moved_in_part(
    folder: RunFolder, process: Process
) -> None:
    manager = make_manager(folder, process)
    for step in (5, 6, 8):
        manager.save(step)
    storage = BusyStorage(folder.checkpoints, busy_step=8)
    resumed = CheckpointManager(CheckpointConfig(), folder, process, make_parts(), CONFIG, storage=storage)
    resumed.load(planned(ResumeConfig(step=5), folder, process, CONFIG))
    with pytest.raises(CheckpointError, match="cannot be moved out of the way"):
        save_now(resumed, 7)
    assert committed(folder) == [5, 8]
    save_now(resumed, 9)
    assert committed(folder) == [5, 9]
    assert [entry.step for entry in scan_superseded(folder.checkpoints)] == [6, 8]
