"""The order of tasks: which task stands at position 0, 1, 2, ... of a run.

The order depends on the sources, their weights and the seed alone, never on what became of earlier tasks.
Sources take turns by smooth weighted round robin; each is visited in a seeded permutation of its tasks, a
new one for each epoch. The state is one counter per source, and no more than one permutation per source is
in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """What the plan knows of a source: its name, its share of the tasks, and how many tasks it has; and, as
    a number means another task there, of which environment under which settings.
    """

    title: str
    weight: float
    num_tasks: int
    environment: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


class Draw(msgspec.Struct, frozen=True):
    """One position of the plan: a task of which a group of episodes is sampled.

    Attributes:
        position: from 0 over all sources.
        source: number of the source.
        task: number of the task in its source.
        epoch: pass over the source, from 0.
        attempt: how many groups of this position were given up before; seeds of sampling depend on it.
    """

    position: int
    source: int
    task: int
    epoch: int
    attempt: int = 0


class Plan:
    """Hands out positions in order."""

    def __init__(
        self, sources: Sequence[PlannedSource], seed: int, counts: Sequence[int] | None = None
    ) -> None:
        """
        Args:
            sources: at least one, each with at least one task.
            seed: of the run.
            counts: tasks taken of each source so far, to go on from; None begins.
        """
        self._sources = tuple(sources)
        self._seed = seed
        self._counts = [0] * len(sources) if counts is None else list(counts)
        self._total_weight = sum(source.weight for source in sources)
        self._permutations: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    @property
    def counts(self) -> tuple[int, ...]:
        """Tasks taken of each source; with the plan's identity, its whole state."""
        return tuple(self._counts)

    @property
    def position(self) -> int:
        """The next position."""
        return sum(self._counts)

    @property
    def num_tasks(self) -> int:
        """Tasks of all sources."""
        return sum(source.num_tasks for source in self._sources)

    @property
    def sources(self) -> tuple[PlannedSource, ...]:
        """In the order of `Draw.source`."""
        return self._sources

    def draw(self) -> Draw:
        """Take the next position."""
        position = self.position
        # Computed from the counters each time, so that no rounding error builds up and the counters are all
        # there is to keep. Ties go to the first source.
        source = max(
            range(len(self._sources)),
            key=lambda i: (
                (position + 1) * self._sources[i].weight - self._counts[i] * self._total_weight,
                -i,
            ),
        )
        epoch, offset = divmod(self._counts[source], self._sources[source].num_tasks)
        self._counts[source] += 1
        return Draw(position, source, int(self._permutation(source, epoch)[offset]), epoch)

    def identity(self, group_size: int) -> dict[str, Any]:
        """JSON values, by the setting that they come from, that positions mean something under.

        Args:
            group_size: episodes of each position.
        """
        identity = {
            "seed": self._seed,
            "rollout.group_size": group_size,
            "sources": [
                [source.title, source.weight, source.num_tasks, source.environment, dict(source.settings)]
                for source in self._sources
            ],
        }
        # As it comes back from a file, or dates and tuples in settings would differ from themselves.
        return msgspec.json.decode(msgspec.json.encode(identity))

    def _permutation(self, source: int, epoch: int) -> npt.NDArray[np.int64]:
        cached = self._permutations.get(source)
        if cached is None or cached[0] != epoch:
            generator = np.random.default_rng([self._seed, source, epoch])
            cached = (epoch, generator.permutation(self._sources[source].num_tasks))
            self._permutations[source] = cached
        return cached[1]
