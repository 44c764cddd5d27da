"""Records of an attempt, and ending with the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from contract.attempt import read_exit, read_pid, record_exit, register_rank

_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from contract.attempt import die_with_parent
die_with_parent(os.getppid())
print("ready", flush=True)
time.sleep(60)
'''], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""

_CHILD = "import os; from contract.attempt import die_with_parent; die_with_parent({parent}); print('alive')"


def test_a_rank_is_found_by_its_process_id(tmp_path: Path) -> None:
    assert read_pid(tmp_path, 3) is None
    register_rank(tmp_path, 3)
    assert read_pid(tmp_path, 3) == os.getpid()
    register_rank(tmp_path, 3, 42)
    assert read_pid(tmp_path, 3) == 42


def test_the_first_failure_of_a_rank_stands(tmp_path: Path) -> None:
    assert read_exit(tmp_path, 0) is None
    record_exit(tmp_path, 0, 0, "")
    record_exit(tmp_path, 0, 1, "cause")
    record_exit(tmp_path, 0, 2, "consequence")
    record = read_exit(tmp_path, 0)
    assert record is not None and (record.code, record.message) == (1, "cause")
    assert abs(record.time_ns - time.time_ns()) < 60e9
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.exit.json"]


def test_a_process_ends_with_its_parent_even_after_kill_9() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while _is_running(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _CHILD.format(parent="os.getppid() + 1")], capture_output=True
    )
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, b"")


def test_a_living_parent_changes_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", _CHILD.format(parent="os.getppid()")], capture_output=True)
    assert (result.returncode, result.stdout) == (0, b"alive\n")


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
