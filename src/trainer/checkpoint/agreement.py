"""Work that succeeds on all ranks or fails on all of them, and the words in which failures are told."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from contract.errors import CheckpointError

T = TypeVar("T")

FAILURES = (Exception, CheckpointException)
"""What a write or read can raise. DCP's own exception is not an `Exception`."""


def on_all_ranks(group: dist.ProcessGroup, what: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and wait for all; collective over `group`.

    Returns:
        The results in order of rank.

    Raises:
        CheckpointError: `action` raised on some rank; raised on every rank, and says on which and why.
    """
    failure: BaseException | None = None
    mine: tuple[str | None, T | None]
    try:
        mine = (None, action())
    except FAILURES as error:
        failure, mine = error, (explain(error), None)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    reasons = {rank: reason for rank, (reason, _) in enumerate(everyone) if reason is not None}
    if reasons:
        # An error that DCP has told every rank already is said once.
        distinct = {reason: rank for rank, reason in reversed(reasons.items())}
        listed = sorted((rank, reason) for reason, rank in distinct.items())
        several = len(everyone) > 1
        told = "; ".join(f"rank {rank}: {reason}" if several else reason for rank, reason in listed)
        raise CheckpointError(f"{what}: {told}") from failure
    return [result for _, result in everyone]


def explain(error: BaseException) -> str:
    """One line that says what went wrong, down to the cause on the rank where it happened."""
    if isinstance(error, CheckpointException):
        causes = {explain(cause): rank for rank, (cause, _) in reversed(error.failures.items())}
        return "; ".join(cause for cause, _ in sorted(causes.items(), key=lambda item: item[1]))
    if isinstance(error, OSError):
        name = f" ({error.filename})" if error.filename else ""
        hint = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "the file is larger than this process or file system allows",
        }.get(error.errno or 0)
        return f"{hint or error.strerror or error}{name}"
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
