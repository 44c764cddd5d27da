"""Signals sent to real processes, and requests that become decisions of real ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from contract import control
from contract.control import REQUESTS, Answer
from contract.errors import Interrupted
from contract.layout import RunFolder
from tests.support.engine import in_new_process, rank_process
from tests.support.ranks import run_ranks
from trainer.parallel.process import open_process
from trainer.parallel.stop import Decision, Requests, handle_signals


def program(mode: str, folder: Path) -> None:
    """A process that waits for signals and notes in files what it comes to."""

    def note(name: str, text: str) -> None:
        (folder / f".{name}").write_text(text)
        (folder / f".{name}").rename(folder / name)

    requests = Requests()
    grace_seconds = 0.5 if mode == "hanging briefly" else None
    try:
        with handle_signals(
            requests, lambda code, reason: note("ended", f"{code} {reason}"), grace_seconds=grace_seconds
        ):
            if mode != "starting":
                requests.arm()
            note("ready", "")
            if mode.startswith("hanging"):
                hang()
            while not requests.signum:
                time.sleep(0.01)
            note("asked", str(requests.signum))
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
    assert (tmp_path / "ended").read_text() == "130 ended at once by a second signal"


def test_the_second_signal_ends_the_process_even_if_its_main_thread_hangs(tmp_path: Path) -> None:
    running = Program("hanging", tmp_path)
    running.send(signal.SIGTERM)
    time.sleep(0.2)
    assert running.process.is_alive()
    running.send(signal.SIGTERM)
    assert running.end() == 128 + signal.SIGTERM
    assert running.files() == {"ready", "ended"}


def test_the_end_of_the_grace_time_ends_a_process_that_hangs(tmp_path: Path) -> None:
    running = Program("hanging briefly", tmp_path)
    running.send(signal.SIGTERM)
    assert running.end() == 128 + signal.SIGKILL
    expected = "137 the run did not end within 0.5 s after a signal (ckpt.grace_seconds)"
    assert (tmp_path / "ended").read_text() == expected


def test_a_signal_during_start_up_ends_the_run_in_order(tmp_path: Path) -> None:
    running = Program("starting", tmp_path)
    running.send(signal.SIGTERM)
    assert running.end() == 128 + signal.SIGTERM
    assert (tmp_path / "interrupted").read_text() == "ended by SIGTERM before training began 143"


_HOLD_BACK = """
import os, signal
from contract.control import holding_pause_signal

def send():
    os.kill(os.getpid(), signal.SIGUSR1)

with holding_pause_signal():
    send()  # before libraries start threads, which inherit what is held back
    from trainer.parallel.process import open_process
    from trainer.parallel.stop import Requests, handle_signals

    requests = Requests()
    with (
        handle_signals(requests, lambda code, reason: None),
        open_process("cpu", num_threads=1, timeout_seconds=60) as process,
    ):
        endings = [requests.decide(process, 0).ending]
        send()
        requests.arm()
        send()
        endings += [requests.decide(process, step).ending for step in (1, 2)]
    send()
assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(endings)
"""


def test_sigusr1_never_ends_the_process_and_one_that_came_early_is_not_lost() -> None:
    finished = subprocess.run([sys.executable, "-c", _HOLD_BACK], capture_output=True, text=True, timeout=120)
    assert (finished.returncode, finished.stdout) == (0, "['SIGUSR1', 'SIGUSR1', '']\n"), finished.stderr


class InterruptedProcess:
    """A rank of one that receives SIGUSR1 in the middle of its first collective."""

    is_main = True

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.num_calls = 0

    def all_max_each(self, values: list[float]) -> list[float]:
        self.num_calls += 1
        if self.num_calls == 1:
            self.requests.receive_pause(signal.SIGUSR1, None)
        return values


def test_sigusr1_that_comes_while_the_ranks_decide_is_left_for_the_next_decision() -> None:
    requests = Requests()
    process: Any = InterruptedProcess(requests)
    endings = [requests.decide(process, step).ending for step in range(3)]
    assert endings == ["", "SIGUSR1", ""]


def agree_on_ranks() -> list[int]:
    process = rank_process()
    requests = Requests()
    requests.arm()
    answers = [requests.agree(process), requests.decide(process, 0).signum]
    if process.rank == 1:
        requests.receive(signal.SIGTERM, None)
        requests.receive(signal.SIGINT, None)  # left to the watcher: the first signal stays the reason
    return [*answers, requests.agree(process), requests.decide(process, 1).signum]


def test_the_signal_of_one_rank_becomes_that_of_all() -> None:
    assert run_ranks(agree_on_ranks, 2) == [[0, 0, 15, 15], [0, 0, 15, 15]]


def ask_ranks(root: str, can_save: bool) -> list[Any]:
    """What the ranks decide, and rank 0's answers: each request comes to one rank only."""
    process = rank_process()
    folder = RunFolder(Path(root))
    requests = Requests(folder, can_save=can_save)
    found: list[Any] = []
    for step, name in enumerate(["nothing", "pause", "save-now", "both", "signal to rank 1"], 1):
        if process.is_main:
            for request in REQUESTS:
                if name in (request, "both"):
                    control.ask(folder, request)
        elif name == "signal to rank 1":
            requests.receive_pause(signal.SIGUSR1, None)
        found.append(requests.decide(process, step))
    if process.is_main:
        found += [control.is_asked(folder, request) for request in REQUESTS]
        found += [control.read_answer(folder, request) for request in REQUESTS]
    return found


def test_a_request_that_rank_0_sees_or_one_rank_receives_is_decided_by_all_and_answered(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(ask_ranks, 2, str(tmp_path), True)
    decisions = [
        Decision(),
        Decision("`ckpt pause`"),
        Decision(save=True),
        Decision("`ckpt pause`"),  # which saves
        Decision("SIGUSR1"),
    ]
    assert first[:5] == second == decisions
    answer = Answer(True, "the run ends after step 4, by `ckpt pause`")
    assert first[5:] == [False, False, answer, answer]


def test_a_run_without_checkpoints_refuses_to_pause_and_to_save(tmp_path: Path) -> None:
    first, second = run_ranks(ask_ranks, 2, str(tmp_path), False)
    assert first[:5] == second == [Decision()] * 5
    refused = Answer(False, "the run saves no checkpoints (--no-ckpt), so it goes on")
    assert first[5:] == [False, False, refused, refused]


def reach_limit() -> list[Decision]:
    process = rank_process()
    # One rank began a little earlier than the other.
    requests = Requests(can_save=False, max_minutes=1e-9 if process.rank == 1 else 60)
    return [requests.decide(process, 3), Requests(max_minutes=60).decide(process, 3)]


def test_the_time_limit_of_one_rank_is_that_of_all_and_needs_no_checkpoints() -> None:
    for decisions in run_ranks(reach_limit, 2):
        assert [bool(item.ending) for item in decisions] == [True, False]
        assert decisions[0].ending.startswith("max_minutes = ") and decisions[0].signum == 0


def test_the_time_limit_counts_from_the_start_of_the_process() -> None:
    assert in_new_process(late_by_age) == [True, False]


def late_by_age() -> list[bool]:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    time.sleep(1.2)
    with open_process("cpu", num_threads=1, timeout_seconds=60) as process:
        return [bool(Requests(max_minutes=minutes).decide(process, 0).ending) for minutes in (1 / 60, 30)]
