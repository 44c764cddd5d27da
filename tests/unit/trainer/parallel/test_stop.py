"""Signals sent to real processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from contract.errors import Interrupted
from tests.support.engine import rank_process
from tests.support.ranks import run_ranks
from trainer.parallel.stop import StopRequest, handle_signals


def program(mode: str, folder: Path) -> None:
    """A process that waits for signals and notes in files what it comes to."""

    def note(name: str, text: str) -> None:
        (folder / f".{name}").write_text(text)
        (folder / f".{name}").rename(folder / name)

    try:
        with handle_signals(lambda code: note("ended", str(code))) as stop:
            if mode != "starting":
                stop.arm()
            note("ready", "")
            if mode == "hanging":
                hang()
            while not stop.signum:
                time.sleep(0.01)
            note("asked", str(stop.signum))
            if mode == "waiting":
                time.sleep(60)
            note("saved", "")
    except Interrupted as error:
        note("interrupted", f"{error} {error.exit_code}")
        sys.exit(error.exit_code)
    note("after", str(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))


def hang() -> None:
    """One call into C that goes on after a signal, as a collective does."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


class Program:
    """`program` in a process of its own."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.folder = folder
        self.process = get_context("forkserver").Process(target=program, args=(mode, folder), daemon=True)
        self.process.start()
        self.wait_for("ready")

    def send(self, signum: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def wait_for(self, name: str) -> str:
        deadline = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline and self.process.is_alive(), f"no {name}"
            time.sleep(0.01)
        return (self.folder / name).read_text()

    def end(self) -> int | None:
        self.process.join(timeout=20)
        code = self.process.exitcode
        self.process.kill()
        return code

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_only_asks_for_the_end(signum: signal.Signals, tmp_path: Path) -> None:
    running = Program("finishing", tmp_path)
    running.send(signum)
    assert running.wait_for("asked") == str(int(signum))
    assert running.end() == 0
    assert running.files() == {"ready", "asked", "saved", "after"}
    # The handlers are those of before again.
    assert (tmp_path / "after").read_text() == "True"


def test_the_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    running = Program("waiting", tmp_path)
    running.send(signal.SIGTERM)
    running.wait_for("asked")
    running.send(signal.SIGINT)
    assert running.end() == 128 + signal.SIGINT
    assert (tmp_path / "ended").read_text() == str(128 + signal.SIGINT)


def test_the_second_signal_ends_the_process_even_if_its_main_thread_hangs(tmp_path: Path) -> None:
    running = Program("hanging", tmp_path)
    running.send(signal.SIGTERM)
    time.sleep(0.2)
    assert running.process.is_alive()
    running.send(signal.SIGTERM)
    assert running.end() == 128 + signal.SIGTERM
    assert running.files() == {"ready", "ended"}


def test_a_signal_during_start_up_ends_the_run_in_order(tmp_path: Path) -> None:
    running = Program("starting", tmp_path)
    running.send(signal.SIGTERM)
    assert running.end() == 128 + signal.SIGTERM
    assert (tmp_path / "interrupted").read_text() == "ended by SIGTERM before training began 143"


def agree_on_ranks() -> list[int]:
    process = rank_process()
    stop = StopRequest()
    stop.arm()
    answers = [stop.agree(process)]
    if process.rank == 1:
        stop.receive(signal.SIGTERM, None)
        stop.receive(signal.SIGINT, None)  # left to the watcher: the first signal stays the reason
    return [*answers, stop.agree(process)]


def test_the_signal_of_one_rank_becomes_that_of_all() -> None:
    assert run_ranks(agree_on_ranks, 2) == [[0, 15], [0, 15]]
