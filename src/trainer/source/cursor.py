"""Which rows an update takes, and which of them a rank gets. Knows rows by number only.

The stream of rows is the concatenation of epochs, each a permutation of all rows that depends on seed and
epoch alone. An update takes the next `batch_size` rows of the stream, also across the end of an epoch. The
position is one number, the rows taken so far, so it means the same at any world size and is reached without
reading what lies before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.errors import ConfigError

ORDER_STREAM, PACKING_STREAM, TOKEN_STREAM = range(3)
"""Last word of each random seed, so that two uses of the run's seed never draw the same numbers."""


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one update.

    Attributes:
        rows: row numbers of the whole update, over all ranks.
        micro_batches: this rank's rows by micro-batch; None is an empty row. Every rank has equally many
            micro-batches, each of equally many rows.
        epoch: passes over the data after this update, as a fraction.
    """

    rows: npt.NDArray[np.int64]
    micro_batches: tuple[tuple[int | None, ...], ...]
    epoch: float


def deal(
    rows: Sequence[int], *, rank: int, world_size: int, micro_batch_rows: int
) -> tuple[tuple[int | None, ...], ...]:
    """This rank's part of `rows` in micro-batches of `micro_batch_rows`, padded with None to the same shape
    on all ranks.

    Row i goes to rank i mod world_size, so that in a short update no rank has only padding before it must.
    """
    num_per_rank = math.ceil(len(rows) / world_size)
    num_micro_batches = math.ceil(num_per_rank / micro_batch_rows)
    mine: list[int | None] = [int(row) for row in rows[rank::world_size]]
    mine.extend([None] * (num_micro_batches * micro_batch_rows - len(mine)))
    return tuple(
        tuple(mine[start : start + micro_batch_rows]) for start in range(0, len(mine), micro_batch_rows)
    )


class RowCursor:
    """Position in the stream of rows. Owned by one source."""

    def __init__(
        self,
        num_rows: int,
        *,
        batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        max_epochs: int | None,
    ) -> None:
        """
        Args:
            num_rows: rows of an epoch; at least 1.
            batch_size: rows of an update, over all ranks.
            micro_batch_size: most rows of a micro-batch.
            rank, world_size: place among the data-parallel ranks.
            seed: decides the order in every epoch.
            shuffle: a new order in every epoch; False keeps the order of the rows.
            max_epochs: passes after which the stream ends; None is endless.

        Raises:
            ConfigError: `batch_size` cannot be dealt evenly to `world_size` ranks.
        """
        assert num_rows >= 1
        if batch_size % world_size:
            raise ConfigError(
                f"data.batch_size = {batch_size} cannot be dealt evenly to {world_size} processes; choose "
                f"a multiple of "
                f"{world_size}, or change deployment.num_processes"
            )
        self._num_rows, self._batch_size = num_rows, batch_size
        self._micro_batch_rows = min(micro_batch_size, batch_size // world_size)
        self._rank, self._world_size = rank, world_size
        self._seed, self._shuffle = seed, shuffle
        self._end = None if max_epochs is None else max_epochs * num_rows
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self.num_rows_taken = 0

    @property
    def steps_left(self) -> int | None:
        """Updates to the end of the stream, the last perhaps short; None if it is endless."""
        if self._end is None:
            return None
        return math.ceil(max(0, self._end - self.num_rows_taken) / self._batch_size)

    def next(self) -> Share | None:
        """The rows of the next update, or None at the end of the stream."""
        start = self.num_rows_taken
        end = start + self._batch_size if self._end is None else min(start + self._batch_size, self._end)
        if start >= end:
            return None
        rows = self._rows(start, end)
        self.num_rows_taken = end
        dealt = deal(
            rows.tolist(),
            rank=self._rank,
            world_size=self._world_size,
            micro_batch_rows=self._micro_batch_rows,
        )
        return Share(rows, dealt, end / self._num_rows)

    def _rows(self, start: int, end: int) -> npt.NDArray[np.int64]:
        parts = []
        while start < end:
            epoch, first = divmod(start, self._num_rows)
            stop = min(self._num_rows, first + end - start)
            parts.append(self._order_of(epoch)[first:stop])
            start += stop - first
        return np.concatenate(parts)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self._num_rows)
            if self._shuffle:
                order = np.random.default_rng([self._seed, epoch, ORDER_STREAM]).permutation(self._num_rows)
            self._order = (epoch, order)
        return self._order[1]
