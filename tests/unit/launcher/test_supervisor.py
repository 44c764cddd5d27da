"""The supervisor of an RL run with small programs as parts: exit codes, signals, nothing stays behind.

All scenarios of this module run at the same time, once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from contract.attempt import read_exit, read_pid
from launcher.alive import marked_processes
from launcher.running import PARTS_VARIABLE

_ROOT = Path(__file__).parents[3]
_READY = ("ready_inference", "ready_orchestrator", "ready_trainer")


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    errors: str
    alive: list[int]
    folder: Path


class Launch:
    """A supervisor's process and its folder."""

    def __init__(self, behaviour: str, folder: Path, grace_seconds: float = 30.0) -> None:
        self.folder = folder
        folder.mkdir()
        words = ["supervise", behaviour, str(folder), str(grace_seconds)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.launcher.rl_programs", *words],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 60
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None, f"it ended before {names}: {self.process.communicate()}"
            assert time.monotonic() < deadline, f"no {names}"
            time.sleep(0.02)

    def signal_part(self, name: str, signum: int) -> None:
        pid = read_pid(self.folder, name)
        assert pid is not None
        os.kill(pid, signum)

    def finish(self) -> Result:
        output, errors = self.process.communicate(timeout=60)
        return Result(self.process.returncode, output, errors, self.alive(), self.folder)

    def alive(self) -> list[int]:
        return marked_processes(PARTS_VARIABLE, str(self.folder)) or []


def _succeed(folder: Path) -> Result:
    return Launch("succeed", folder).finish()


def _on_a_terminal(folder: Path) -> Result:
    controller, terminal = os.openpty()
    folder.mkdir()
    words = ["supervise", "succeed", str(folder), "30"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.launcher.rl_programs", *words],
        cwd=_ROOT,
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # which says that the other side was closed
        while piece := os.read(controller, 65536):
            shown += piece
    os.close(controller)
    _, errors = process.communicate(timeout=60)
    return Result(process.returncode, shown.decode(), errors.decode(), [], folder)


def _lose_server(folder: Path) -> Result:
    launch = Launch("lose_server", folder)
    launch.wait_for(*_READY)
    launch.signal_part("inference", signal.SIGKILL)
    return launch.finish()


def _server_ends_well(folder: Path) -> Result:
    return Launch("ends_well", folder).finish()


def _orchestrator_fails(folder: Path) -> Result:
    return Launch("fail", folder).finish()


def _folder_is_moved(folder: Path) -> Result:
    return Launch("moved", folder).finish()


def _orchestrator_is_told_to_end(folder: Path) -> Result:
    launch = Launch("wait", folder)
    launch.wait_for(*_READY)
    launch.signal_part("orchestrator", signal.SIGTERM)
    return launch.finish()


def _orchestrator_lingers(folder: Path) -> Result:
    return Launch("orchestrator_lingers", folder).finish()


def _pause(folder: Path) -> Result:
    launch = Launch("pause", folder)
    launch.wait_for(*_READY)
    launch.process.send_signal(signal.SIGUSR1)
    return launch.finish()


def _interrupt(folder: Path) -> Result:
    launch = Launch("wait", folder)
    launch.wait_for(*_READY)
    launch.process.send_signal(signal.SIGINT)
    return launch.finish()


def _interrupt_at_start(folder: Path) -> Result:
    launch = Launch("never_healthy", folder)
    launch.wait_for("ready_inference")
    launch.process.send_signal(signal.SIGINT)
    return launch.finish()


def _never_healthy(folder: Path) -> Result:
    return Launch("never_healthy", folder).finish()


def _other_run(folder: Path) -> Result:
    return Launch("other_run", folder).finish()


def _exceed_grace(folder: Path) -> Result:
    launch = Launch("ignore", folder, grace_seconds=1.0)
    launch.wait_for(*_READY)
    launch.process.send_signal(signal.SIGTERM)
    return launch.finish()


def _third_signal(folder: Path) -> Result:
    launch = Launch("ignore", folder, grace_seconds=300.0)
    launch.wait_for(*_READY)
    for _ in range(3):
        launch.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    return launch.finish()


def _kill_launcher(folder: Path) -> Result:
    launch = Launch("ignore", folder, grace_seconds=0.5)
    launch.wait_for(*_READY)
    launch.process.kill()
    began = time.monotonic()
    while launch.alive() and time.monotonic() < began + 30:
        time.sleep(0.05)
    return launch.finish()


def _sweeper_hangs(folder: Path) -> Result:
    launch = Launch("wait", folder)
    launch.wait_for(*_READY)
    (sweeper,) = _sweepers(folder)
    os.kill(sweeper, signal.SIGSTOP)
    launch.process.send_signal(signal.SIGINT)
    return launch.finish()


def _sweepers(folder: Path) -> list[int]:
    words = b"\0".join((b"launcher.sweeper", bytes(folder)))
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if words in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def _stuck(folder: Path) -> Result:
    return Launch("stuck", folder).finish()


_SCENARIOS: list[Callable[[Path], Result]] = [
    _succeed,
    _on_a_terminal,
    _lose_server,
    _server_ends_well,
    _orchestrator_fails,
    _folder_is_moved,
    _orchestrator_is_told_to_end,
    _orchestrator_lingers,
    _pause,
    _interrupt,
    _interrupt_at_start,
    _never_healthy,
    _other_run,
    _exceed_grace,
    _third_signal,
    _kill_launcher,
    _sweeper_hangs,
    _stuck,
]

Results = Callable[[Callable[[Path], Result]], Result]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """Starts all scenarios; gives the function that waits for one."""
    root = tmp_path_factory.mktemp("launches")
    with ThreadPoolExecutor(max_workers=5) as pool:
        futures: dict[Callable[[Path], Result], Future[Result]] = {
            scenario: pool.submit(scenario, root / scenario.__name__) for scenario in _SCENARIOS
        }
        yield lambda scenario: futures[scenario].result()


def test_a_run_that_ends_well_ends_the_server_and_shows_what_matters(results: Results) -> None:
    result = results(_succeed)
    assert (result.code, result.errors, result.alive) == (0, "", [])
    assert "step 1\n" in result.output and "policy server ready at http://127.0.0.1:" in result.output
    assert "[orchestrator] 12:00:00 warning: slow\n" in result.output
    assert "[inference] 12:00:00 warning: hot\n" in result.output and "GET /version" not in result.output
    record = read_exit(result.folder, "inference")
    assert record is not None and record.code == 128 + signal.SIGTERM


def test_on_a_terminal_a_panel_shows_the_state_of_each_part_below_the_lines(results: Results) -> None:
    result = results(_on_a_terminal)
    assert (result.code, result.errors) == (0, "")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.output)
    assert "step 1" in shown and "[orchestrator] 12:00:00 warning: slow" in shown
    for row in (
        r"inference +serving +\d+",
        r"orchestrator +running +\d+",
        r"trainer +(running|ended \(0\)) +\d+",
    ):
        assert re.search(row, shown), shown


def test_a_killed_server_is_the_first_failure_and_the_trainer_does_not_mask_it(results: Results) -> None:
    result = results(_lose_server)
    assert result.code == 128 + signal.SIGKILL
    first, *rest = result.errors.splitlines()
    assert first.startswith("the policy server ended first, with exit code 137: ") and "SIGKILL" in first
    assert [line.strip() for line in rest[1:]] == [f"line {number}" for number in range(10, 30)]
    assert result.alive == []


def test_a_server_that_ends_by_itself_is_a_failure_though_it_says_success(results: Results) -> None:
    result = results(_server_ends_well)
    assert result.code == 1 and "the policy server ended first" in result.errors
    assert result.alive == []


def test_after_a_failure_the_trainer_saves_while_the_server_is_still_there(results: Results) -> None:
    result = results(_orchestrator_fails)
    assert result.code == 7
    assert "the orchestrator ended first, with exit code 7: the cause" in result.errors
    assert "    why it failed" in result.errors
    assert (result.folder / "saved").read_text() == f"[{int(signal.SIGTERM)}] True"
    assert result.alive == [], "a worker of the orchestrator was left behind"


def test_a_run_folder_that_was_moved_is_told(results: Results) -> None:
    result = results(_folder_is_moved)
    assert result.code == 1 and f"{result.folder} is not there any more" in result.errors
    assert result.alive == []


def test_an_orchestrator_that_somebody_ends_is_a_failure(results: Results) -> None:
    result = results(_orchestrator_is_told_to_end)
    assert result.code == 128 + signal.SIGTERM and "the orchestrator ended first" in result.errors
    assert (result.folder / "saved").exists() and result.alive == []


def test_an_orchestrator_that_outlives_the_trainer_is_a_failure(results: Results) -> None:
    result = results(_orchestrator_lingers)
    assert result.code == 1 and "it did not end within 1 s after the trainer" in result.errors
    assert result.alive == []


def test_a_pause_reaches_the_trainer_alone_and_is_no_failure(results: Results) -> None:
    result = results(_pause)
    assert (result.code, result.errors) == (75, "the run is paused; go on with --resume\n")
    assert (result.folder / "asked").read_text() == f"[{int(signal.SIGUSR1)}]"
    assert result.alive == []


def test_ctrl_c_reaches_the_trainer_alone_and_the_others_wait_until_it_has_saved(results: Results) -> None:
    result = results(_interrupt)
    assert (result.code, result.errors) == (128 + signal.SIGINT, "the run was ended by SIGINT\n")
    assert (result.folder / "saved").read_text() == f"[{int(signal.SIGINT)}] True"
    record = read_exit(result.folder, "orchestrator")
    assert record is not None and record.code == 128 + signal.SIGTERM
    assert result.alive == []


def test_ctrl_c_before_the_server_is_ready_ends_everything(results: Results) -> None:
    result = results(_interrupt_at_start)
    assert (result.code, result.errors) == (
        128 + signal.SIGINT,
        "ended by SIGINT before training began\n",
    )
    assert not (result.folder / "trainer.log").exists() and result.alive == []


def test_a_server_that_does_not_answer_in_time_is_a_failure_with_its_log(results: Results) -> None:
    result = results(_never_healthy)
    assert result.code == 1 and "within 1.5 s" in result.errors and "    loading" in result.errors
    assert result.alive == []


def test_a_server_of_another_run_at_the_port_is_not_taken_for_the_own_one(results: Results) -> None:
    result = results(_other_run)
    assert result.code == 1 and "within 1.5 s" in result.errors
    assert not (result.folder / "trainer.log").exists() and result.alive == []


def test_parts_that_do_not_end_within_the_grace_time_are_killed(results: Results) -> None:
    result = results(_exceed_grace)
    assert result.code == 128 + signal.SIGKILL and "did not end within 1 s" in result.errors
    assert result.alive == []


def test_a_third_signal_kills_at_once(results: Results) -> None:
    result = results(_third_signal)
    assert result.code == 128 + signal.SIGKILL and "third signal" in result.errors
    assert result.alive == []


def test_kill_9_of_the_launcher_leaves_nothing_even_if_parts_ignore_signals(results: Results) -> None:
    assert results(_kill_launcher).alive == []


def test_a_sweeper_that_hangs_is_killed_and_does_not_keep_the_run_from_ending(results: Results) -> None:
    result = results(_sweeper_hangs)
    assert result.code == 128 + signal.SIGINT
    assert "the sweeper hung, and was killed after 1 s; no process of the run is left" in result.errors
    assert _sweepers(result.folder) == [] and result.alive == []


def test_a_run_without_progress_ends_and_says_where_everything_stood(results: Results) -> None:
    result = results(_stuck)
    assert result.code == 1 and "no step was finished within" in result.errors
    assert "in orchestrator_stuck" in (result.folder / "orchestrator.log").read_text()
    assert "in orchestrator_stuck" in result.errors
    assert (result.folder / "saved").exists(), "the trainer was not asked to save"
    assert result.alive == []
