"""What holds for every kind of channel, and the words in which a breach is told."""

from __future__ import annotations

from contract.errors import ChannelError


def check_order(last: int | None, sequence: int) -> None:
    """Refuse a frame that does not follow `last`, the one sent before it (None before the first).

    Raises:
        ChannelError: it does not.
    """
    if sequence < 1 or (last is not None and sequence != last + 1):
        expected = "a number from 1 on" if last is None else f"{last + 1}"
        raise ChannelError(f"frame {sequence} was to be sent out of order; expected {expected}")


def gone(sequence: int) -> ChannelError:
    """The error for a frame that is asked for after it was acknowledged."""
    return ChannelError(
        f"frame {sequence} was acknowledged before and is gone from the channel: the trainer stands behind "
        f"the orchestrator; end the run and go on with --resume, which starts both from one step"
    )
