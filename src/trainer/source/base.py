"""What the loop asks of a source of batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

from contract.batch import MicroBatch, StepBatch


class Pending(Enum):
    """The type of `PENDING`."""

    PENDING = "pending"


PENDING = Pending.PENDING
"""In place of a batch: none has come yet, ask again."""


class Source(Protocol):
    """Yields the batch of one update after the other. Deterministic; its position is state.

    The position is global: it does not depend on rank or world size, so a run can go on at another world size
    and sees the rows it would have seen. All methods are collective.
    """

    @property
    def steps_left(self) -> int | None:
        """Updates from the present position to the end of the data (`max_epochs`); None if it never ends."""
        ...

    def next_step(self) -> StepBatch | Pending | None:
        """The batch of the next update for this rank; on all ranks alike None if there is no more data, or
        `PENDING` if a short wait brought none.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Position after the last batch handed out, and the identity of the data; JSON values, equal on all
        ranks.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state`.

        Raises:
            DataError: the data is not that of `state` (other rows, seq_len, packing or order).
        """
        ...

    def summary(self) -> dict[str, str]:
        """Lines for the start-up summary: title and value, e.g. {"rows": "1,200 (3 skipped: no assistant
        turn)"}.
        """
        ...


class ValidationSource(Protocol):
    """A fixed set of held-out rows, dealt to the ranks."""

    def micro_batches(self) -> Iterable[MicroBatch]:
        """This rank's rows; every rank yields the same number."""
        ...
