"""Which positions of the plan are done, under way or to be done again, and the snapshot of all that.

Invariant: every position below the plan's next one is either done (trained on, or dropped) or outstanding
(waiting, in flight, or finished and not yet in a batch). A snapshot names the outstanding ones, so a run that
goes on from it does them first: none is skipped, and none that was done is done again.
"""

from __future__ import annotations

import heapq
from typing import Any

import msgspec

from contract.errors import CheckpointError, DataError
from contract.store import Folder, read_bytes
from orchestrator.plan import Draw, Plan

SNAPSHOT_NAME = "state.json"
_FORMAT_VERSION = 1
_ANEW = "set resume.skip_progress and resume.skip_data to start with the tasks from the beginning"


class Snapshot(msgspec.Struct, frozen=True):
    """The orchestrator after the batch of `step`; JSON.

    Attributes:
        identity: `Plan.identity`; positions mean nothing under another one.
        counts: `Plan.counts`.
        outstanding: positions that are neither trained on nor dropped.
        baseline: metrics of the evaluation before training, for the comparison at the end; may be empty.
        evaluated: version up to which evaluations are in the metrics of the batches up to `step`; None
            without evaluations.
    """

    format_version: int
    step: int
    identity: dict[str, Any]
    counts: list[int]
    outstanding: list[Draw]
    baseline: dict[str, float]
    evaluated: int | None = None


def load_snapshot(folder: Folder, identity: dict[str, Any]) -> Snapshot | None:
    """Read the snapshot in a checkpoint; None from one that was saved before the first batch came.

    Args:
        folder: the orchestrator's part of the checkpoint.
        identity: of the plan that the run has now.

    Raises:
        CheckpointError: the file is missing or holds no snapshot.
        DataError: it is one of another plan.
    """
    path = folder / SNAPSHOT_NAME
    try:
        snapshot = msgspec.json.decode(read_bytes(folder, SNAPSHOT_NAME), type=Snapshot | None)
    except OSError as error:
        raise CheckpointError(
            f"cannot read the orchestrator's state {path}: {error.strerror}; resume from a checkpoint of an "
            f"RL run, or {_ANEW}"
        ) from error
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"{path} is no state of an orchestrator: {error}; go on from another step (resume.step; `ckpt "
            f"verify RUN` says which are whole)"
        ) from error
    if snapshot is None:
        return None
    if snapshot.format_version != _FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {snapshot.format_version}, this Tailrace reads {_FORMAT_VERSION}"
        )
    names = [*identity, *(name for name in snapshot.identity if name not in identity)]
    differing = [
        f"{name} was {snapshot.identity.get(name)}, is {identity.get(name)}"
        for name in names
        if snapshot.identity.get(name) != identity.get(name)
    ]
    if differing:
        raise DataError(
            f"the tasks are not those of the checkpoint, so its position means nothing here: "
            f"{'; '.join(differing)} (a source is its name, weight, number of tasks, environment and "
            f"settings). Set them as they "
            f"were, or {_ANEW}"
        )
    return snapshot


class Progress:
    """Owner of the plan's cursor and of everything outstanding."""

    def __init__(self, plan: Plan, group_size: int, outstanding: list[Draw] | None = None) -> None:
        """
        Args:
            plan: where it stands, nothing of it is under way.
            group_size: episodes of each position, part of the plan's identity.
            outstanding: positions of an earlier run to do first.
        """
        self._plan = plan
        self._group_size = group_size
        self._outstanding = {draw.position: draw for draw in outstanding or []}
        self._waiting = sorted(self._outstanding)

    @property
    def epoch(self) -> float:
        """Passes over the tasks of all sources that are done, as a fraction."""
        return (self._plan.position - len(self._outstanding)) / self._plan.num_tasks

    def take(self) -> Draw:
        """The next position to sample: one given back (lowest first), or a new one."""
        if self._waiting:
            return self._outstanding[heapq.heappop(self._waiting)]
        draw = self._plan.draw()
        self._outstanding[draw.position] = draw
        return draw

    def give_back(self, draw: Draw) -> None:
        """Its group was given up: it is to be sampled again, with other seeds."""
        self._outstanding[draw.position] = Draw(
            draw.position, draw.source, draw.task, draw.epoch, draw.attempt + 1
        )
        heapq.heappush(self._waiting, draw.position)

    def finish(self, draw: Draw) -> None:
        """It was trained on, or dropped for good."""
        del self._outstanding[draw.position]

    def snapshot(self, step: int, baseline: dict[str, float], evaluated: int | None = None) -> bytes:
        """The state now, as the content of the checkpoint's file.

        Args:
            step: of the batch that was just taken.
            baseline: see `Snapshot`; so for `evaluated`.
        """
        outstanding = [self._outstanding[position] for position in sorted(self._outstanding)]
        return msgspec.json.encode(
            Snapshot(
                _FORMAT_VERSION,
                step,
                self._plan.identity(self._group_size),
                list(self._plan.counts),
                outstanding,
                baseline,
                evaluated,
            )
        )
