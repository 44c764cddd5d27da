"""What credit assignment is: the advantages of the episodes of one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_RELATIVE_TOLERANCE = 1e-9


class Credit(Protocol):
    """An algorithm's view of a group."""

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per reward; finite, and exactly 0 where there is nothing to compare.

        Args:
            rewards: finite, of the group's valid episodes only; at least one.
        """
        ...


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by no more than rounding, so that nothing can be learned from them."""
    low, high = min(rewards), max(rewards)
    return high - low <= _RELATIVE_TOLERANCE * max(1.0, abs(low), abs(high))
