"""What a run knows and can still do after a save that failed: on all ranks the same."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import CheckpointError
from contract.layout import RunFolder
from contract.record import CommitRecord, StepEntry
from tests.support.ranks import run_ranks
from tests.unit.trainer.checkpoint.fakes import (
    FakeOwner,
    FakePart,
    Gate,
    committed,
    open_async,
    process_of_rank,
    simple_parts,
)
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.storage import LocalStorage
from trainer.config.checkpoint import CheckpointConfig
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process

SECONDS = 30.0


def outcome(manager: CheckpointManager) -> dict[str, float]:
    """Of the save in flight, whose end is waited for without a limit."""
    while not (values := manager.poll()):
        pass
    return values


def save_after_a_lost_group(root: str) -> list[object]:
    """Rank 1 hangs for longer than rank 0 waits for it in a collective of the background group."""
    process, gate = process_of_rank(write_timeout_seconds=3.0), Gate()
    manager = open_async(
        process,
        RunFolder(Path(root)),
        simple_parts(),
        gate,
        on_failure="warn",
        write_timeout_seconds=0.5,
    )
    if process.rank == 1:
        gate.close()
    future = manager.save(1)
    told: list[object] = [manager.poll(wait=True)]
    if process.is_main:
        assert "did not answer" in str(future.exception(SECONDS))
    process.barrier()
    gate.open.set()
    future.exception(SECONDS)
    process.barrier()
    manager.save(2)
    told.append(outcome(manager).get("checkpoint/step"))
    manager.save(3)
    told.append(outcome(manager).get("checkpoint/step"))
    return told


def test_saves_work_again_after_a_collective_of_the_background_group_timed_out(tmp_path: Path) -> None:
    given_up = {"checkpoint/failed_saves": 1.0}
    assert run_ranks(save_after_a_lost_group, 2, str(tmp_path)) == [[given_up, 2.0, 3.0]] * 2
    assert committed(RunFolder(tmp_path)) == [2, 3]


def wait_for_a_hanging_write(root: str) -> str:
    """What the optimizer is told. Of the state, which is equal on both ranks, one rank waits for its write;
    the other is in a collective meanwhile.
    """
    process, gate = process_of_rank(timeout_seconds=8.0), Gate()
    parts = simple_parts()
    owner = FakeOwner(parts["optimizer"].held.values())
    manager = open_async(process, RunFolder(Path(root)), parts, gate, owner, write_timeout_seconds=60.0)
    gate.close()
    manager.save(1)
    threading.Timer(20.0, gate.open.set).start()
    message = ""
    try:
        owner.update()
    except CheckpointError as error:
        message = str(error)
    process.barrier()
    gate.open.set()
    return message


def test_an_optimizer_that_waits_for_a_write_gives_up_before_its_peers_time_out(tmp_path: Path) -> None:
    messages = sorted(run_ranks(wait_for_a_hanging_write, 2, str(tmp_path)))
    assert messages[0] == ""
    assert "did not let the optimizer's state go within 4 s" in messages[1]
    assert "deployment.collective_timeout_seconds" in messages[1]


class BrittlePart(FakePart):
    """Has no memory for a snapshot while `is_short`."""

    is_short = False

    def tensors(self) -> dict[str, LogicalTensor]:
        if self.is_short:
            raise MemoryError("no pinned memory is left")
        return super().tensors()


def save_with_too_little_memory(root: str) -> list[object]:
    process = process_of_rank(write_timeout_seconds=5.0)
    part = BrittlePart({"m": torch.ones(40)}, residence="host")
    parts = {**simple_parts(), "optimizer": part}
    manager = open_async(process, RunFolder(Path(root)), parts, Gate(), interval=1)
    part.is_short = process.rank == 1
    told: list[object] = []
    try:
        manager.save_if_due(1)
    except CheckpointError as error:
        told.append(str(error))
    part.is_short = False
    manager.save_if_due(2)
    return [*told, manager.wait()["checkpoint/step"]]


def test_memory_that_is_short_on_one_rank_fails_the_save_on_all_and_leaves_the_next_one_whole(
    tmp_path: Path,
) -> None:
    message = (
        "checkpoint of step 1 was not saved, earlier ones are unchanged: "
        "rank 1: MemoryError: no pinned memory is left"
    )
    assert run_ranks(save_with_too_little_memory, 2, str(tmp_path)) == [[message, 2.0]] * 2


class LateStorage(LocalStorage):
    """Its disk says of the step `fails_at` that it failed when the step exists already; it cannot be listed
    or delete while it `is_dumb`.
    """

    def __init__(self, checkpoints: Path, fails_at: int | None = None) -> None:
        super().__init__(checkpoints)
        self._fails_at = fails_at
        self.is_dumb = False

    def commit(self, step: int, record: CommitRecord) -> None:
        super().commit(step, record)
        if step == self._fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def scan(self) -> list[StepEntry]:
        if self.is_dumb:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().scan()

    def remove(self, step: int) -> None:
        if self.is_dumb:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().remove(step)


def open_late(
    folder: RunFolder, process: Process, fails_at: int | None = None, **settings: Any
) -> tuple[CheckpointManager, LateStorage]:
    config = CheckpointConfig(interval=1, on_failure="warn", **settings)
    storage = LateStorage(folder.checkpoints, fails_at)
    return CheckpointManager(config, folder, process, simple_parts(), {}, storage=storage), storage


def save_after_a_late_failure(root: str) -> list[object]:
    process, folder = process_of_rank(), RunFolder(Path(root))
    manager, _ = open_late(folder, process, fails_at=1, keep_last=2)
    told: list[object] = []
    for step in (1, 2):
        values = manager.save_if_due(step)
        assert values is not None
        told.append(values.get("checkpoint/failed_saves"))
    told.append(manager.save_if_due(1, now=True))  # both ranks know now that it exists
    manager.save_if_due(3)
    process.barrier()
    return [*told, committed(folder)]


def test_a_step_whose_save_failed_after_its_commit_is_known_to_all_ranks_after_the_next_one(
    tmp_path: Path,
) -> None:
    assert run_ranks(save_after_a_late_failure, 2, str(tmp_path)) == [[1.0, None, None, [2, 3]]] * 2


def test_only_steps_that_the_run_wrote_or_goes_on_from_are_deleted(
    folder: RunFolder, process: Process
) -> None:
    other = RunFolder(folder.root.parent / "other")
    open_late(other, process)[0].save(1)
    manager, _ = open_late(folder, process, keep_last=1)
    manager.save_if_due(2)
    (other.checkpoints / "step_1").rename(folder.checkpoints / "step_1")  # somebody puts it there
    manager.save_if_due(3)
    assert committed(folder) == [1, 3]


def test_a_storage_that_cannot_be_listed_after_a_commit_costs_no_save_and_nothing_is_deleted(
    folder: RunFolder, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    manager, storage = open_late(folder, process, keep_last=1)
    manager.save_if_due(1)
    storage.is_dumb = True
    values = manager.save_if_due(2)
    assert values is not None and values["checkpoint/step"] == 2
    assert "after the commit of step 2 nothing is deleted" in caplog.text and committed(folder) == [1, 2]
    storage.is_dumb = False
    manager.save_if_due(3)
    assert committed(folder) == [3]
