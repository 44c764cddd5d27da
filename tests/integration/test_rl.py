"""Whole RL runs by the command `rl`: they learn, they end without orphans, and they lose no task."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.commit import scan
from contract.layout import RunFolder
from telemetry.metrics import read_metrics
from tests.support.runs import Command, Finished, run_environment, wait_until

_ROOT = Path(__file__).parents[2]
_CONFIG = _ROOT / "configs" / "debug" / "rl.toml"
_SECONDS = 240.0


class Place:
    """A folder with one RL run, and its commands. A context manager: they are dead when it is left."""

    def __init__(self, root: Path, *flags: str) -> None:
        self.root = root
        self.folder = RunFolder(root / "rl")
        self.environment = run_environment(root / "cache")
        self.commands: list[Command] = []
        self._flags = ["--output-dir", str(root), "--run-name", "rl", "--no-export", *flags]

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        for command in self.commands:
            command.kill_all()

    def start(self, *flags: str) -> Command:
        model = ["--model.name", str(_ROOT / "configs" / "debug" / "model")]
        words = [sys.executable, "-m", "launcher.rl", "@", str(_CONFIG), *model, *self._flags, *flags]
        command = Command(words, self.environment, self.root)
        self.commands.append(command)
        return command

    def steps_done(self) -> int:
        """Updates in the metrics."""
        path = self.folder.metrics
        if not path.exists():
            return 0
        return max((record["step"] for record in read_metrics(path) if "loss" in record), default=0)

    def await_step(self, step: int, command: Command) -> None:
        def is_there() -> bool:
            assert command.process.poll() is None, command.output
            return self.steps_done() >= step

        wait_until(is_there, f"step {step} of the run", seconds=_SECONDS)

    def latest_checkpoint(self) -> int:
        return max(
            (entry.step for entry in scan(self.folder.checkpoints) if entry.problem is None), default=0
        )


def _finish(command: Command) -> Finished:
    return command.wait(_SECONDS)


def _passed(folder: RunFolder) -> list[float]:
    """Share of held-out tasks that were answered right, at each evaluation."""
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [record["eval/sort-letters/pass@1"] for record in records if "eval/version" in record]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--channel.type", "zmq", "--publish.type", "collective", "--deployment.num-processes", "2"],
    ],
    ids=["files", "network and two ranks"],
)
def test_the_debug_run_learns_its_task(flags: list[str], tmp_path: Path) -> None:
    with Place(tmp_path, *flags, "--max-steps", "25") as place:
        finished = _finish(place.start())
    assert finished.code == 0, finished.output
    before, after = _passed(place.folder)
    assert before < 0.5 < 0.6 < after, (before, after)
    assert "Held-out tasks" in finished.output, "the tables of the orchestrator were not shown"
    assert place.latest_checkpoint() == 25


def _interrupt(place: Place, command: Command) -> None:
    command.process.send_signal(signal.SIGINT)


def _pause(place: Place, command: Command) -> None:
    command.process.send_signal(signal.SIGUSR1)


# What kill -9 does is the business of test_rl_kill.py.
_ENDS: list[tuple[Callable[[Place, Command], None], int, str]] = [
    (_interrupt, 130, "the run was ended by SIGINT"),
    (_pause, 75, "paused"),
]


@pytest.mark.timeout(1200)
def test_a_run_that_was_asked_to_end_goes_on_without_an_orphan_and_no_task_is_lost(tmp_path: Path) -> None:
    with Place(tmp_path, "--max-steps", "8", "--ckpt.interval", "1", "--no-evaluation") as place:
        flags: list[str] = []
        for end, code, message in _ENDS:
            command = place.start(*flags)
            place.await_step(place.latest_checkpoint() + 2, command)
            end(place, command)
            finished = _finish(command)  # fails if a process outlives it
            assert finished.code == code, finished.output
            assert message in finished.output
            assert place.latest_checkpoint() == place.steps_done()
            flags = ["--resume"]
        finished = _finish(place.start(*flags))
    assert finished.code == 0, finished.output
    _check_that_no_task_was_lost(place.folder)


def _check_that_no_task_was_lost(folder: RunFolder) -> None:
    """Every group of the plan was trained once or dropped once, by the traces and the metrics."""
    trained: Counter[int] = Counter()
    for step in range(1, 9):
        lines = (folder.rollouts / f"step_{step}.jsonl").read_text().splitlines()
        trained.update({json.loads(line)["position"] for line in lines})
    assert max(trained.values()) == 1, "a task was trained twice"
    state = json.loads((folder.checkpoints / "step_8" / "orchestrator" / "state.json").read_text())
    dropped = sum(
        record["groups/dropped_no_signal"] + record["groups/dropped_failed"]
        for record in read_metrics(folder.metrics)
        if "loss" in record
    )
    assert len(trained) + dropped + len(state["outstanding"]) == sum(state["counts"])
