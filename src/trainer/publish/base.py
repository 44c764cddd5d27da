"""What the loop asks of a publisher of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Publisher(Protocol):
    """Hands the weights to whoever draws from the policy."""

    def publish(self, version: int) -> Mapping[str, float]:
        """Make the present weights policy `version` everywhere; collective.

        Returns:
            Metrics, the seconds that it took among them.

        Raises:
            PublishError: somebody stays on the version before; raised on every rank.
        """
        ...

    def close(self) -> None:
        """Release what the publisher holds; called on every end. Not collective."""
        ...


class NoPublisher:
    """Where nobody waits for weights. Implements `Publisher`."""

    def publish(self, version: int) -> Mapping[str, float]:
        """See `Publisher`."""
        return {}

    def close(self) -> None:
        """See `Publisher`."""
