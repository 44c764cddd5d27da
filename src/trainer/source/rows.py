"""A source whose rows are known by number: position, dealing and state, shared by chat data and synthetic
rows.

What a row holds is left to a `RowSet`; in which order rows come and who gets them to `cursor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from contract.batch import MicroBatch, Sample, StepBatch, build_micro_batch
from contract.errors import DataError
from contract.packing import pack
from trainer.config.data import BatchConfig
from trainer.source.cursor import RowCursor
from trainer.source.table import COMPONENT, TokenTable


class RowSet(Protocol):
    """The rows of one epoch; fixed for the whole run."""

    def __len__(self) -> int:
        """Number of rows; at least 1."""
        ...

    def samples(self, row: int) -> list[Sample]:
        """The samples packed into row `row`."""
        ...

    def count_samples(self, rows: npt.NDArray[np.int64]) -> int:
        """Samples in all of `rows`."""
        ...


class PackedRows:
    """Samples of a table, packed into rows once."""

    def __init__(self, table: TokenTable, order: npt.NDArray[np.int64], *, capacity: int | None) -> None:
        """
        Args:
            table: samples; each at most `capacity` long.
            order: the samples in the order in which they are packed.
            capacity: tokens of a row; None gives every sample a row of its own.
        """
        self._table = table
        if capacity is None:
            self._samples, self._offsets = order, np.arange(len(order) + 1)
            return
        packed = pack(table.lengths[order].tolist(), capacity)
        self._offsets = np.zeros(len(packed) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in packed], out=self._offsets[1:])
        self._samples = order[
            np.fromiter((item for row in packed for item in row), dtype=np.int64, count=len(order))
        ]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._offsets) - 1

    def samples(self, row: int) -> list[Sample]:
        """The samples packed into row `row`."""
        return [
            self._table.sample(int(index))
            for index in self._samples[self._offsets[row] : self._offsets[row + 1]]
        ]

    def count_samples(self, rows: npt.NDArray[np.int64]) -> int:
        """Samples in all of `rows`."""
        return int((self._offsets[rows + 1] - self._offsets[rows]).sum())


class RowSource:
    """A `Source` over a `RowSet`."""

    def __init__(
        self,
        rows: RowSet,
        config: BatchConfig,
        *,
        identity: Mapping[str, Any],
        summary: Mapping[str, str],
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        max_epochs: int | None,
        pad_to: int | None,
        pad_token: int,
    ) -> None:
        """
        Args:
            rows: the rows of an epoch.
            config: batch sizes.
            identity: JSON values, by the setting that they come from, on which rows and their order depend;
                the seed is added.
            summary: lines for the start-up summary.
            rank, world_size: place among the data-parallel ranks.
            seed, shuffle: decide the order of rows.
            max_epochs: passes over the data; None is endless.
            pad_to: length to which each row is padded; None does not pad.
            pad_token: id used for padding.

        Raises:
            ConfigError: the batch cannot be dealt evenly to `world_size` ranks.
        """
        self._rows_of_epoch = rows
        self._identity = {**identity, "seed": seed}
        self._summary = dict(summary)
        self._pad_to, self._pad_token = pad_to, pad_token
        self._cursor = RowCursor(
            len(rows),
            batch_size=config.batch_size,
            micro_batch_size=config.micro_batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
            max_epochs=max_epochs,
        )

    @property
    def steps_left(self) -> int | None:
        """Updates from the present position to the end of the data; None if it never ends."""
        return self._cursor.steps_left

    def next_step(self) -> StepBatch | None:
        """The batch of the next update for this rank, or None on all ranks alike if there is no more data."""
        share = self._cursor.next()
        if share is None:
            return None
        micro_batches = [
            build_rows(self._rows_of_epoch, rows, pad_to=self._pad_to, pad_token=self._pad_token)
            for rows in share.micro_batches
        ]
        return StepBatch(micro_batches, self._rows_of_epoch.count_samples(share.rows), share.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Rows taken so far over all ranks, and the identity of the data; equal on all ranks."""
        return {"num_rows_taken": self._cursor.num_rows_taken, "identity": dict(self._identity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state`.

        Raises:
            DataError: the data is not that of `state`, or `state` is none of this source.
        """
        saved, taken = state.get("identity"), state.get("num_rows_taken")
        if not isinstance(saved, Mapping) or not isinstance(taken, int) or taken < 0:
            raise DataError(
                f"the checkpoint's data position is not one of this kind of data (it holds "
                f"{sorted(state)}); set "
                "resume.skip_data to start over with the data"
            )
        names = [*self._identity, *(name for name in saved if name not in self._identity)]
        differing = [
            f"{name} was {_show(saved.get(name))}, is {_show(self._identity.get(name))}"
            for name in names
            if saved.get(name) != self._identity.get(name)
        ]
        if differing:
            raise DataError(
                f"the data is not that of the checkpoint, so its position means nothing here: "
                f"{'; '.join(differing)}. "
                "Use the same data and settings, or set resume.skip_data to start over with the data"
            )
        self._cursor.num_rows_taken = taken

    def summary(self) -> dict[str, str]:
        """Lines for the start-up summary: title and value."""
        return dict(self._summary)


def build_rows(
    rows: RowSet, numbers: Sequence[int | None], *, pad_to: int | None, pad_token: int
) -> MicroBatch:
    """The micro-batch of the rows with these numbers; None is an empty row."""
    samples = [[] if number is None else rows.samples(number) for number in numbers]
    return build_micro_batch(samples, pad_to=pad_to, pad_token=pad_token, components=(COMPONENT,))


def _show(value: Any) -> str:
    return "not set" if value is None else repr(value)
