"""Launching several ranks under torchrun's real agent: exit codes, signals, and that nothing stays behind.

Every scenario is a launch of its own with small programs as ranks. Most of its time is the agent importing
torch, so all scenarios of this module run at the same time, once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from contract.attempt import ExitRecord, read_pid
from launcher.alive import marked_processes
from launcher.processes import first_failure
from launcher.spec import ATTEMPT_VARIABLE

_ROOT = Path(__file__).parents[3]


class Launch:
    """A launcher process and its folder."""

    def __init__(
        self, behaviour: str, folder: Path, grace_seconds: float = 30.0, stop_seconds: float = 1.0
    ) -> None:
        self.folder = folder
        folder.mkdir()
        words = ["launch", behaviour, str(folder), "2", str(grace_seconds), str(stop_seconds)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.launcher.programs", *words],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 90
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None, (
                f"the launcher ended before {names}: {self.process.communicate()}"
            )
            assert time.monotonic() < deadline, f"no {names}"
            time.sleep(0.02)

    def finish(self) -> Result:
        """Wait for the end; records what is alive at that instant, and how long it took."""
        began = time.monotonic()
        output, errors = self.process.communicate(timeout=90)
        seconds = time.monotonic() - began
        return Result(self.process.returncode, output, errors, seconds, self.alive(), self.folder)

    def alive(self) -> list[int]:
        return marked_processes(ATTEMPT_VARIABLE, str(self.folder)) or []


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    errors: str
    seconds: float
    alive: list[int]
    folder: Path


def _succeed(folder: Path) -> Result:
    return Launch("succeed", folder).finish()


def _fail(folder: Path) -> Result:
    launch = Launch("fail", folder)
    launch.wait_for("rank_1.exit.json")
    return launch.finish()


def _kill_rank(folder: Path) -> Result:
    launch = Launch("lose_peer", folder)
    launch.wait_for("ready_0", "ready_1")
    pid = read_pid(folder, 0)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return launch.finish()


def _terminate(folder: Path) -> Result:
    launch = Launch("save", folder)
    launch.wait_for("ready_0", "ready_1")
    launch.process.send_signal(signal.SIGTERM)
    return launch.finish()


def _interrupt_twice(folder: Path) -> Result:
    launch = Launch("save_slowly", folder)
    launch.wait_for("ready_0", "ready_1")
    launch.process.send_signal(signal.SIGINT)
    launch.wait_for("saving_0", "saving_1")
    launch.process.send_signal(signal.SIGINT)
    return launch.finish()


def _pause(folder: Path) -> Result:
    launch = Launch("pause", folder)
    # No rank can answer yet; the agent and the guards never can.
    launch.wait_for("ready_0", "ready_1")
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in launch.alive()}
    own = [
        pid for pid, line in words.items() if b"\0launcher.agent\0" in line or b"\0launcher.guard\0" in line
    ]
    assert len(own) == 3
    for pid in [*own, launch.process.pid]:
        os.kill(pid, signal.SIGUSR1)
    return launch.finish()


def _pause_and_fail(folder: Path) -> Result:
    return Launch("pause_and_fail", folder).finish()


def _exceed_grace(folder: Path) -> Result:
    launch = Launch("ignore", folder, grace_seconds=1.0)
    launch.wait_for("ready_0", "ready_1")
    launch.process.send_signal(signal.SIGTERM)
    return launch.finish()


def _terminate_at_start(folder: Path) -> Result:
    launch = Launch("wait", folder)
    launch.wait_for("agent.log")
    time.sleep(0.3)
    launch.process.send_signal(signal.SIGTERM)
    return launch.finish()


def _kill_launcher(folder: Path) -> Result:
    launch = Launch("wait", folder)
    launch.wait_for("ready_0", "ready_1")
    launch.process.kill()
    began = time.monotonic()
    while launch.alive() and time.monotonic() < began + 30:
        time.sleep(0.02)
    return launch.finish()


def _kill_agent(folder: Path) -> Result:
    launch = Launch("wait", folder)
    launch.wait_for("ready_0", "ready_1")
    (agent,) = (
        pid for pid in launch.alive() if b"launcher.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(agent, signal.SIGKILL)
    return launch.finish()


_SCENARIOS: list[Callable[[Path], Result]] = [
    _succeed,
    _fail,
    _kill_rank,
    _terminate,
    _interrupt_twice,
    _pause,
    _pause_and_fail,
    _exceed_grace,
    _terminate_at_start,
    _kill_launcher,
    _kill_agent,
]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Callable[[Path], Result]], Result]]:
    """Starts all scenarios; gives the function that waits for one."""
    root = tmp_path_factory.mktemp("launches")
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures: dict[Callable[[Path], Result], Future[Result]] = {
            scenario: pool.submit(scenario, root / scenario.__name__) for scenario in _SCENARIOS
        }
        yield lambda scenario: futures[scenario].result()


Results = Callable[[Callable[[Path], Result]], Result]


def test_ranks_get_torchruns_environment_and_rank_0_is_shown(results: Results) -> None:
    result = results(_succeed)
    assert (result.code, result.output, result.errors) == (0, "rank 0 of 2 at 127.0.0.1, 1 thread\n", "")
    assert (result.folder / "rank_1.log").read_text() == "rank 1 of 2 at 127.0.0.1, 1 thread\n"


def test_a_failed_rank_decides_the_exit_code_and_ends_a_hanging_peer(results: Results) -> None:
    result = results(_fail)
    assert result.code == 7
    assert result.output == "before\n", "an error that follows from another rank's was shown as well"
    assert "rank 1 ended first, with exit code 7: the cause" in result.errors
    shown = [line.strip() for line in result.errors.splitlines() if line.startswith("    ")]
    assert shown == [f"line {number}" for number in range(80, 100)]
    assert result.seconds < 15 and result.alive == []


def test_a_killed_rank_is_the_first_failure_and_its_peer_does_not_mask_it(results: Results) -> None:
    result = results(_kill_rank)
    assert result.code == 128 + signal.SIGKILL
    assert "rank 0 ended first, with exit code 137: the process was killed by SIGKILL" in result.errors
    assert result.alive == []


def test_sigterm_lets_every_rank_save_undisturbed_though_another_one_ended(results: Results) -> None:
    result = results(_terminate)
    assert result.code == 128 + signal.SIGTERM
    assert (result.folder / "saved").read_text() == str(int(signal.SIGTERM))
    assert result.errors == "the run was ended by SIGTERM\n"
    assert result.alive == []


def test_a_second_ctrl_c_reaches_the_ranks_too(results: Results) -> None:
    result = results(_interrupt_twice)
    assert result.code == 128 + signal.SIGINT
    assert result.seconds < 10 and result.alive == []


def test_sigusr1_reaches_every_rank_once_and_a_pause_is_no_failure(results: Results) -> None:
    result = results(_pause)
    assert (result.code, result.errors) == (75, "the run is paused; go on with --resume\n")
    assert [(result.folder / f"asked_{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert result.alive == []


def test_a_failure_beside_a_paused_rank_is_a_failure_of_the_run(results: Results) -> None:
    result = results(_pause_and_fail)
    assert result.code == 7 and "rank 0 ended first, with exit code 7: the cause" in result.errors
    assert result.alive == []


def test_ranks_that_do_not_end_within_the_grace_time_are_killed(results: Results) -> None:
    result = results(_exceed_grace)
    assert result.code == 128 + signal.SIGKILL
    assert "did not end within 1 s" in result.errors
    assert result.alive == []


def test_a_signal_during_start_up_ends_everything(results: Results) -> None:
    result = results(_terminate_at_start)
    assert result.code == 128 + signal.SIGTERM
    assert not (result.folder / "ready_0").exists()
    assert result.seconds < 10 and result.alive == []


def test_kill_9_of_the_launcher_leaves_no_orphan(results: Results) -> None:
    assert results(_kill_launcher).alive == []


def test_kill_9_of_the_agent_ends_the_ranks_and_the_run_fails(results: Results) -> None:
    result = results(_kill_agent)
    assert result.code == 128 + signal.SIGKILL
    assert "the process that starts the ranks failed" in result.errors
    assert result.alive == []


def test_the_first_failure_is_the_cause_and_not_its_consequence() -> None:
    lost = ExitRecord(0, 1, "connection reset", time_ns=5)
    killed = ExitRecord(1, 137, "killed", time_ns=9, signum=9)
    told = ExitRecord(2, 143, "told to end", time_ns=1, signum=15, ended_by_launcher=True)
    fine = ExitRecord(3, 0, "", time_ns=0)
    paused = ExitRecord(4, 75, "", time_ns=2)
    assert first_failure([lost, killed, told, fine]) is killed
    assert first_failure([lost, told, fine]) is lost
    assert first_failure([told, fine]) is told
    assert first_failure([paused, lost]) is lost
    assert first_failure([fine, paused]) is None
