"""One part of an RL run as a process."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from contract.attempt import read_exit
from launcher.running import PartSpec, RunningPart


def _ended(attempt: Path, program: str = "raise SystemExit(3)") -> RunningPart:
    part = RunningPart(PartSpec("part", [sys.executable, "-c", program], {}), attempt, ())
    deadline = time.monotonic() + 60
    while part.is_running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return part


def test_an_end_of_which_a_part_left_no_record_is_recorded(tmp_path: Path) -> None:
    _ended(tmp_path).record_end()
    record = read_exit(tmp_path, "part")
    assert record is not None and (record.code, record.final) == (3, True)


def test_a_part_that_a_signal_without_a_name_has_killed_is_described(tmp_path: Path) -> None:
    failure = _ended(tmp_path, "import os; os.kill(os.getpid(), 40)").failure()
    assert failure is not None and (failure.code, failure.message) == (
        168,
        "the process was killed by signal 40",
    )


def test_a_record_that_cannot_be_written_is_no_error_of_the_run(tmp_path: Path) -> None:
    part = _ended(tmp_path)
    shutil.rmtree(tmp_path)
    part.record_end()
    assert part.code == 3
