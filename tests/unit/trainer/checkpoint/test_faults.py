"""Saves behind the step that fail, hang, or are overtaken by the end of the run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from contract.commit import verify
from contract.errors import CheckpointError, NonFiniteError
from contract.layout import RunFolder
from tests.support.ranks import run_ranks
from tests.unit.trainer.checkpoint.fakes import (
    FakeOwner,
    Gate,
    committed,
    open_async,
    process_of_rank,
    simple_parts,
)
from trainer.checkpoint.manager import CheckpointManager
from trainer.parallel.process import Process

EIO, ENOSPC = OSError(errno.EIO, os.strerror(errno.EIO)), OSError(errno.ENOSPC, "No space left")


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.iterdir())


def fail_on_rank_1(root: str, error: OSError | Exception) -> tuple[str, list[str]]:
    """What every rank learns in the one `poll` after the write of step 2 has failed; and what is left."""
    process, gate, folder = process_of_rank(), Gate(), RunFolder(Path(root))
    manager = open_async(process, folder, simple_parts(), gate)
    manager.save(1)
    manager.wait()
    if process.rank == 1:
        gate.error = error  # pyright: ignore[reportAttributeAccessIssue]
    concurrent.futures.wait([manager.save(2)], 30)
    try:
        manager.poll()
    except CheckpointError as failure:
        manager.close()
        return str(failure), names(folder)
    return "", []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ENOSPC, "rank 1: the disk is full"),
        (EIO, "rank 1: Input/output error"),
        (ZeroDivisionError("a defect"), "rank 1: ZeroDivisionError: a defect"),
    ],
)
def test_a_failure_in_a_writer_thread_of_one_rank_reaches_all_within_a_step(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    for message, left in run_ranks(fail_on_rank_1, 2, str(tmp_path), error):
        assert message.startswith(f"checkpoint of step 2 was not saved, earlier ones are unchanged: {reason}")
        assert left == ["step_1"]
    assert verify(tmp_path / "checkpoints" / "step_1") == []


def go_on_after_failures(root: str) -> list[object]:
    process, gate, folder = process_of_rank(), Gate(), RunFolder(Path(root))
    manager = open_async(process, folder, simple_parts(), gate, on_failure="warn", interval=1)
    told: list[object] = []
    for step in (1, 2, 3):
        gate.error = ENOSPC if process.rank == 1 and step < 3 else None
        manager.save_if_due(step)
        told.append(manager.poll(wait=True).get("checkpoint/failed_saves"))
        process.barrier()
        told.append(names(folder))
        process.barrier()
    gate.error = ENOSPC if process.rank == 1 else None
    try:
        manager.save_if_due(4, last=True)
    except CheckpointError as failure:
        told.append("step 4 was not saved" in str(failure))
    return told


def test_failures_that_only_warn_are_counted_leave_nothing_and_the_next_save_works(tmp_path: Path) -> None:
    expected = [1.0, [], 2.0, [], None, ["step_3"], True]
    assert run_ranks(go_on_after_failures, 2, str(tmp_path)) == [expected] * 2
    assert committed(RunFolder(tmp_path)) == [3]


def save_when_free(manager: CheckpointManager, step: int) -> None:
    """Save as soon as a write that was given up has ended."""
    while True:
        with contextlib.suppress(CheckpointError):
            manager.save(step)
            return


def hang_on_rank_1(root: str, group_seconds: float) -> list[object]:
    """A storage that hangs on one rank, longer than the time limit, and comes back."""
    process, gate, folder = process_of_rank(group_seconds), Gate(), RunFolder(Path(root))
    parts = simple_parts()
    owner = FakeOwner(parts["optimizer"].held.values())
    manager = open_async(
        process, folder, parts, gate, owner, on_failure="warn", interval=1, write_timeout_seconds=1.0
    )
    if process.rank == 1:
        gate.close()
    manager.save_if_due(1)
    owner.update()  # on rank 1 it goes on without the writer
    told: list[object] = [manager.poll(wait=True), manager.poll()]
    values = manager.save_if_due(2)
    assert values is not None
    told.append(values["checkpoint/failed_saves"])
    gate.open.set()
    assert manager.poll(wait=True) == {}
    save_when_free(manager, 3)
    told += [manager.poll(wait=True).get("checkpoint/failed_saves"), committed(folder)]
    return told


def test_a_write_that_hangs_on_one_rank_is_given_up_and_the_next_save_waits_for_its_end(
    tmp_path: Path,
) -> None:
    given_up = {"checkpoint/failed_saves": 1.0}
    for told in run_ranks(hang_on_rank_1, 2, str(tmp_path), 30.0):
        assert told == [given_up, {}, 2.0, None, [3]]
    assert names(RunFolder(tmp_path)) == ["step_3"]


@pytest.mark.parametrize("on_failure", ["stop", "warn"])
def test_a_write_that_hangs_ends_the_run_at_the_last_save_or_when_failures_do(
    folder: RunFolder, process: Process, on_failure: str
) -> None:
    gate = Gate()
    settings = {"on_failure": on_failure, "write_timeout_seconds": 0.3}
    manager = open_async(process, folder, simple_parts(), gate, **settings)
    gate.close()
    if on_failure == "warn":
        with pytest.raises(CheckpointError, match=r"step 1 did not end within 0\.3 s, and was given up"):
            manager.save_if_due(1, last=True)
    else:
        manager.save_if_due(1, now=True)
        with pytest.raises(CheckpointError, match=r"step 1 did not end within 0\.3 s, and was given up"):
            manager.save_if_due(2, now=True)
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: an earlier write, .* still hangs"):
        manager.save(2)
    manager.close()  # says nothing anew, and does not wait again
    gate.open.set()
    save_when_free(manager, 3)
    manager.wait()
    assert names(folder) == ["step_3"]


def test_an_error_in_training_lets_the_write_in_flight_finish(folder: RunFolder, process: Process) -> None:
    gate = Gate()
    gate.close()
    with (
        pytest.raises(NonFiniteError, match="of the training"),
        open_async(process, folder, simple_parts(), gate) as manager,
    ):
        manager.save(1)
        threading.Timer(0.3, gate.open.set).start()
        raise NonFiniteError("of the training")
    assert committed(folder) == [1]


@pytest.mark.parametrize("kind", ["fails", "hangs"])
def test_an_error_in_training_is_not_hidden_by_a_write_that_fails_or_hangs(
    folder: RunFolder, process: Process, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    gate = Gate()
    gate.close()
    seconds = 30.0 if kind == "fails" else 0.3
    manager = open_async(process, folder, simple_parts(), gate, write_timeout_seconds=seconds)
    future = manager.save(1)
    with pytest.raises(NonFiniteError, match="of the training"), manager:
        assert gate.reached.wait(30)
        if kind == "fails":
            gate.error = EIO
            gate.open.set()
        raise NonFiniteError("of the training")
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    (record,) = [record for record in errors if record.name.startswith("trainer.")]
    assert ("Input/output error" if kind == "fails" else "was given up") in record.getMessage()
    gate.open.set()
    assert isinstance(future.exception(30), CheckpointError)
    assert names(folder) == []


def test_a_failure_that_nobody_polled_is_raised_when_the_manager_is_closed(
    folder: RunFolder, process: Process
) -> None:
    gate = Gate()
    gate.error = EIO
    with (
        pytest.raises(CheckpointError, match="Input/output error"),
        open_async(process, folder, simple_parts(), gate) as manager,
    ):
        manager.save(1)


SCRIPT = """
import sys
from pathlib import Path
from contract.layout import RunFolder
from tests.unit.trainer.checkpoint.fakes import Gate, open_async, single_process
from tests.unit.trainer.checkpoint.test_faults import simple_parts

if __name__ == "__main__":
    gate = Gate()
    gate.close()
    with single_process() as process:
        settings = {"write_timeout_seconds": 0.2}
        manager = open_async(process, RunFolder(Path(sys.argv[1])), simple_parts(), gate, **settings)
        manager.save(1)
        assert gate.reached.wait(30)
        try:
            manager.close()
        except Exception as error:
            print(error, flush=True)
    sys.exit(7)
"""


def test_a_thread_that_is_stuck_in_a_hanging_storage_does_not_keep_the_process_alive(
    folder: RunFolder,
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(folder.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert (done.returncode, "was given up" in done.stdout) == (7, True), done.stderr
    assert committed(folder) == []
