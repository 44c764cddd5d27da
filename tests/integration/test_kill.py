"""A run that is killed at any instant goes on from a committed step as if it had not died."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field

import pytest

from contract.commit import scan
from tests.integration.place import Place, assert_same_tensors, trained
from tests.support.runs import Rank, wait_until

NUM_STEPS = 30
OPTIONS = {"max_steps": NUM_STEPS, "ckpt__interval": 1, "ckpt__keep_last": 2}


@dataclass
class Survivor:
    """A run that is killed again and again."""

    place: Place
    name: str
    world_size: int
    committed: list[int] = field(default_factory=list)

    def is_complete(self) -> bool:
        """Whether the last step is committed."""
        return NUM_STEPS in self.committed

    def begin(self) -> list[Rank]:
        """Start it, or go on with it; a run that has no committed step yet starts anew."""
        flag = "--resume" if self.committed else "--clean"
        return self.place.start(self.name, flag, world_size=self.world_size, **OPTIONS)

    def kill(self, drawn: random.Random) -> None:
        """Kill one rank at a random instant: in start-up, or while it trains and saves."""
        size_before = self._metrics_size()
        ranks = self.begin()
        victim = drawn.choice(ranks)
        if drawn.random() < 0.8:
            wait_until(
                lambda: self._metrics_size() > size_before or not victim.is_running(), "the first step"
            )
            time.sleep(drawn.uniform(0.0, 0.4))
        else:
            time.sleep(drawn.uniform(0.0, 0.8))
        victim.send(signal.SIGKILL)
        codes = [rank.wait(30).code for rank in ranks]
        assert codes == [0] * len(ranks) or (0 not in codes and -signal.SIGKILL in codes)

    def check(self) -> None:
        """There is a committed step to go on from, no older than before, and all of them are whole."""
        before, self.committed = self.committed, self.place.committed(self.name)
        if before:
            assert self.committed
            assert max(self.committed) >= max(before)
        assert len(self.committed) <= 3  # keep_last, and one that was to be deleted when the kill came
        entries = scan(self.place.folder(self.name).checkpoints)
        assert {entry.state for entry in entries} <= {"committed", "uncommitted"}

    def _metrics_size(self) -> int:
        path = self.place.folder(self.name).metrics
        return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize(("world_size", "num_kills"), [(1, 24), (2, 6)])
def test_whenever_it_is_killed_a_committed_step_is_there_and_the_completed_run_equals_the_uninterrupted_one(
    place: Place, world_size: int, num_kills: int
) -> None:
    drawn = random.Random(world_size)
    place.train("whole", world_size=world_size, **OPTIONS)
    runs: list[Survivor] = []
    for _ in range(num_kills):
        if not runs or runs[-1].is_complete():
            runs.append(Survivor(place, f"killed_{len(runs)}", world_size))
        runs[-1].kill(drawn)
        runs[-1].check()
    if not runs[-1].is_complete():
        assert [rank.wait().code for rank in runs[-1].begin()] == [0] * world_size

    for run in runs:
        assert place.committed(run.name) == [NUM_STEPS - 1, NUM_STEPS]
        assert_same_tensors(place.checkpoint(run.name, NUM_STEPS), place.checkpoint("whole", NUM_STEPS))
        assert trained(place.metrics(run.name)) == trained(place.metrics("whole"))


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
