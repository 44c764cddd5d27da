"""What the two ends of the rollout channel can do.

Frames are numbered from 1 (`sequence`) and arrive in order, each until it is acknowledged: a receiver that
ends before it has acknowledged a frame gets it again when it comes back. Neither end looks into a frame.
"""

from __future__ import annotations

from typing import Protocol


class Sender(Protocol):
    """The orchestrator's end."""

    async def send(self, sequence: int, frame: bytes) -> None:
        """Hand `frame` over; returns as soon as it is safe with the channel, not when it is received.

        Raises:
            ChannelError: it cannot be handed over.
        """
        ...

    async def acknowledged(self) -> int:
        """Greatest sequence that the receiver has acknowledged; 0 before the first."""
        ...

    async def receiver(self) -> str | None:
        """Id of the receiver that has last asked this sender for a frame; None before one has."""
        ...

    async def close(self) -> None:
        """Give up what is not acknowledged."""
        ...


class Receiver(Protocol):
    """The trainer's end, on its first rank."""

    def receive(self, sequence: int, timeout_seconds: float) -> bytes | None:
        """The frame `sequence`, or None if it does not come within the time.

        Raises:
            ChannelError: it cannot be read.
        """
        ...

    def acknowledge(self, sequence: int) -> None:
        """This frame and all before it are not needed again."""
        ...

    def close(self) -> None:
        """Leave the channel."""
        ...
