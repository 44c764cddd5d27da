"""`ckpt pause` and `ckpt save-now` towards a folder whose lock this test holds in a run's place."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contract import control
from contract.control import Answer, PausedMark, Request
from contract.errors import RunFolderError
from contract.layout import RunFolder
from launcher import ckpt
from launcher.folder import is_running, lock

MARK = PausedMark(7, "`ckpt pause`", True, "2026-01-01T00:00:00Z")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@contextmanager
def running(folder: RunFolder, act: Callable[[], object]) -> Iterator[None]:
    """A run that does `act` once it has the lock, and gives the lock back then."""
    locked = threading.Event()

    def run() -> None:
        with lock(folder):
            locked.set()
            act()

    thread = threading.Thread(target=run)
    thread.start()
    locked.wait(10)
    yield
    thread.join(30)


def wait_for(folder: RunFolder, request: Request) -> None:
    deadline = time.monotonic() + 20
    while not control.is_asked(folder, request):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pause_waits_for_the_answer_and_the_end_of_the_run(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[bool] = []

    def act() -> None:
        wait_for(folder, "pause")
        control.answer(folder, "pause", Answer(True, "the run ends after step 7"))
        time.sleep(0.5)
        control.mark_paused(folder, MARK)
        ended.append(True)

    with running(folder, act):
        assert ckpt.main(["pause", str(folder.root)]) == 0
        assert ended == [True]
    output = capsys.readouterr().out
    assert "ends with exit code 75" in output and "the run ends after step 7\n" in output
    assert "paused at step 7, which is saved (by `ckpt pause`, 2026-01-01T00:00:00Z); go on with" in output


def test_a_run_that_accepts_and_then_fails_was_not_paused(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    def act() -> None:
        wait_for(folder, "pause")
        control.answer(folder, "pause", Answer(True, "the run ends after step 7"))

    with running(folder, act):
        assert ckpt.main(["pause", str(folder.root)]) == 1
    assert "the run ended, but not in a pause: see" in capsys.readouterr().err


@pytest.mark.parametrize("request_", ["pause", "save-now"])
def test_a_refusal_is_an_error_in_the_words_of_the_run(
    request_: Request, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    def act() -> None:
        wait_for(folder, request_)
        control.answer(folder, request_, Answer(False, "no checkpoints"))
        time.sleep(1)  # it goes on

    with running(folder, act):
        assert ckpt.main([request_, str(folder.root)]) == 1
        assert is_running(folder)
    assert "ckpt: error: refused: no checkpoints" in capsys.readouterr().err


def test_without_waiting_the_request_is_left_and_an_answer_to_an_earlier_one_is_not(
    folder: RunFolder,
) -> None:
    done = threading.Event()
    with running(folder, lambda: done.wait(20)):
        control.ask(folder, "save-now")
        control.answer(folder, "save-now", Answer(True, "earlier"))
        assert ckpt.main(["save-now", "--no-wait", str(folder.root)]) == 0
        assert control.is_asked(folder, "save-now") and control.read_answer(folder, "save-now") is None
        done.set()


def test_ctrl_c_ends_the_wait_and_not_the_request(folder: RunFolder) -> None:
    done = threading.Event()
    with running(folder, lambda: done.wait(30)):
        command = [sys.executable, "-m", "launcher.ckpt", "pause", str(folder.root)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(folder, "pause")
        time.sleep(0.3)
        process.send_signal(2)
        output, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (130, "stopped waiting; the run pauses all the same\n"), output
        assert control.is_asked(folder, "pause")
        done.set()


@pytest.mark.parametrize(
    ("accepted", "state"), [(False, "has not finished its step"), (True, "pauses, and has not ended")]
)
def test_the_end_of_the_time_limit_ends_the_wait_and_not_the_request(
    accepted: bool, state: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    done = threading.Event()

    def act() -> None:
        wait_for(folder, "pause")
        if accepted:
            control.answer(folder, "pause", Answer(True, "the run ends after step 7"))
        done.wait(30)

    with running(folder, act):
        assert ckpt.main(["pause", "--timeout", "0.5", str(folder.root)]) == 1
        told = capsys.readouterr().err
        assert f"stopped waiting after 0.5 s (--timeout): the run in {folder.root} {state}." in told
        assert control.is_asked(folder, "pause") is not accepted
        done.set()


def test_a_folder_without_a_running_run_is_refused_and_says_if_it_is_paused(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt.main(["pause", str(folder.root / "missing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    with lock(folder):
        pass
    control.mark_paused(folder, MARK)
    assert ckpt.main(["pause", str(folder.root)]) == 2
    assert "no run is going on" in (message := capsys.readouterr().err)
    assert "it is paused already, at step 7" in message
    assert not folder.control.exists()


def test_a_look_at_the_lock_does_not_keep_a_run_from_starting(folder: RunFolder) -> None:
    with lock(folder):
        pass
    look = (folder.root / ".lock").open()
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.2, look.close).start()
    with lock(folder), pytest.raises(RunFolderError, match="a run is going on"), lock(folder):
        pass
