"""A run that is killed at any instant goes on from a committed step as if it had not died."""

from __future__ import annotations

import json
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from contract.commit import scan
from tests.integration.place import Place, assert_same_tensors, trained
from tests.support.runs import Rank, wait_until

NUM_STEPS = 30
KEEP_LAST = 2
OPTIONS: dict[str, Any] = {"max_steps": NUM_STEPS, "ckpt__interval": 1, "ckpt__keep_last": KEEP_LAST}
BEHIND: dict[str, Any] = {"ckpt__async_save": True}
STATE_ON_HOST: dict[str, Any] = {**OPTIONS, "model__offload": "optimizer"}
# Every second step: kills come also between the end of a write and the begin of the next.
ALL_ON_HOST: dict[str, Any] = {**OPTIONS, "model__offload": "full", "ckpt__interval": 2}


@dataclass
class Survivor:
    """A run that is killed again and again."""

    place: Place
    name: str
    world_size: int
    options: dict[str, Any]
    committed: list[int] = field(default_factory=list)
    """Steps that were there after the last kill."""
    seen: list[int] = field(default_factory=list)
    """Steps that were there, or that the run had told of as saved, when the last kill came."""
    was_killed: bool = False
    """Whether the last attempt was."""
    num_cut: int = 0
    """Kills that left a step half-written."""

    def is_complete(self) -> bool:
        """Whether the last step is committed."""
        return NUM_STEPS in self.committed

    def begin(self) -> list[Rank]:
        """Start it, or go on with it; a run that has no committed step yet starts anew."""
        flag = "--resume" if self.committed else "--clean"
        return self.place.start(self.name, flag, world_size=self.world_size, **self.options)

    def kill(self, drawn: random.Random) -> None:
        """Kill one rank at a random instant: in start-up, or while it trains and saves."""
        size_before, attempts_before = self._metrics_size(), self._first_steps().keys()
        ranks = self.begin()
        victim = drawn.choice(ranks)
        if drawn.random() < 0.8:
            wait_until(
                lambda: self._metrics_size() > size_before or not victim.is_running(), "the first step"
            )
            time.sleep(drawn.uniform(0.0, 0.4))
        else:
            time.sleep(drawn.uniform(0.0, 0.8))
        self.seen = self._found("committed")
        victim.send(signal.SIGKILL)
        codes = [rank.wait(30).code for rank in ranks]
        self.was_killed = -signal.SIGKILL in codes
        if NUM_STEPS not in self._found("committed"):
            assert self.was_killed and 0 not in codes
        for attempt, step in self._first_steps().items():
            assert attempt in attempts_before or step == max(self.committed, default=0) + 1

    def finish(self) -> None:
        """Go on with it to its end."""
        assert [rank.wait().code for rank in self.begin()] == [0] * self.world_size
        self.was_killed = False

    def check(self) -> None:
        """There is a committed step to go on from, no older than what was there or was told of as saved
        before the kill, and all of them are whole.
        """
        before, self.committed = self.committed, self.place.committed(self.name)
        told = [int(record["checkpoint/step"]) for record in self._records() if "checkpoint/step" in record]
        assert max(self.committed, default=0) >= max([0, *before, *self.seen, *told])
        # Never fewer than are kept; and one more, where it was to be deleted when the kill came.
        num_saved = max(self.committed, default=0) // self.options["ckpt__interval"]
        assert min(KEEP_LAST, num_saved) <= len(self.committed) <= max(KEEP_LAST, len(before)) + 1
        half_written = self._found("uncommitted")
        assert len(scan(self.place.folder(self.name).checkpoints)) == len(self.committed) + len(half_written)
        self.num_cut += bool(half_written)

    def _found(self, state: str) -> list[int]:
        entries = scan(self.place.folder(self.name).checkpoints)
        return [entry.step for entry in entries if entry.state == state]

    def _metrics_size(self) -> int:
        try:
            return self.place.folder(self.name).metrics.stat().st_size
        except FileNotFoundError:  # not begun, or --clean
            return 0

    def _records(self) -> list[dict[str, Any]]:
        """Of all attempts; a line that a kill tore is left out."""
        records, path = [], self.place.folder(self.name).metrics
        for line in path.read_text().splitlines() if path.exists() else []:
            with suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return records

    def _first_steps(self) -> dict[int, int]:
        """The first step that each attempt trained."""
        trained_steps = [record for record in self._records() if "loss" in record]
        return {record["attempt"]: record["step"] for record in reversed(trained_steps)}


@pytest.mark.parametrize(
    ("world_size", "num_kills", "options", "is_behind"),
    [
        pytest.param(1, 24, OPTIONS, False, id="within the step, 1 rank"),
        pytest.param(2, 6, OPTIONS, False, id="within the step, 2 ranks"),
        # These four are 50 kills.
        pytest.param(1, 22, STATE_ON_HOST, True, id="behind the step, state on the host, 1 rank"),
        pytest.param(1, 20, ALL_ON_HOST, True, id="behind the step, all on the host, 1 rank"),
        pytest.param(2, 4, STATE_ON_HOST, True, id="behind the step, state on the host, 2 ranks"),
        pytest.param(2, 4, ALL_ON_HOST, True, id="behind the step, all on the host, 2 ranks"),
    ],
)
def test_whenever_it_is_killed_a_committed_step_is_there_and_the_completed_run_equals_the_uninterrupted_one(
    place: Place, world_size: int, num_kills: int, options: dict[str, Any], is_behind: bool
) -> None:
    drawn = random.Random(world_size)
    place.train("whole", world_size=world_size, **options)
    if is_behind:
        options = options | BEHIND
    runs: list[Survivor] = []
    for _ in range(num_kills):
        if not runs or runs[-1].is_complete():
            runs.append(Survivor(place, f"killed_{len(runs)}", world_size, options))
        runs[-1].kill(drawn)
        runs[-1].check()
    if not runs[-1].is_complete():
        runs[-1].finish()

    # Of a few kills none may come while a step is written; of twenty some do.
    assert num_kills < 20 or sum(run.num_cut for run in runs) > 0, "no kill came while a step was written"
    for run in runs:
        # A kill after the last commit may leave one more, which no later save deletes.
        *older, before_last, last = place.committed(run.name)
        assert (before_last, last) == (NUM_STEPS - options["ckpt__interval"], NUM_STEPS)
        assert older == [] or run.was_killed
        assert_same_tensors(place.checkpoint(run.name, NUM_STEPS), place.checkpoint("whole", NUM_STEPS))
        metrics = place.metrics(run.name)
        assert trained(metrics) == trained(place.metrics("whole"))
        # Only a save behind the step holds anything.
        assert any("checkpoint/hold_seconds" in record for record in metrics.values()) == is_behind


def test_killing_one_rank_of_the_command_gives_exit_code_137_and_leaves_nothing_behind(place: Place) -> None:
    command = place.command(
        deployment__num_processes=2, max_steps=100_000, ckpt__interval=1, ckpt__keep_last=2
    )
    wait_until(lambda: place.folder().metrics.exists() and len(place.metrics()) > 3, "the third step")
    pid_file = place.folder().logs / "latest" / "rank_1.pid"
    rank = Rank(int(pid_file.read_text()), pid_file, place.root / "never")
    rank.send(signal.SIGKILL)

    finished = command.wait(60)
    assert finished.code == 137, finished.output
    assert "rank 1 ended first" in finished.output
    assert "killed by SIGKILL" in finished.output
    assert place.committed()
