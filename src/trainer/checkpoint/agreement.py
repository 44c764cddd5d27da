"""Work that succeeds on all ranks or fails on all of them, and the words in which failures are told."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from contract.errors import CheckpointError, TailraceError

T = TypeVar("T")

FAILURES = (Exception, CheckpointException)
"""What a write or read can raise. DCP's own exception is not an `Exception`."""


def on_all_ranks(group: dist.ProcessGroup, what: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and wait for all; collective over `group`.

    Returns:
        The results in order of rank.

    Raises:
        CheckpointError: `action` raised on some rank; raised on every rank, and says on which and why. Or a
            rank is lost; raised on those that are left.
    """
    failure: BaseException | None = None
    result: T | None = None
    reasons: dict[int, str] = {}
    try:
        result = action()
    except CheckpointException as error:
        # DCP has agreed already: every rank holds the failures of all.
        failure, reasons = error, {rank: explain(cause) for rank, (cause, _) in error.failures.items()}
    except Exception as error:
        failure, reasons = error, {dist.get_rank(group): explain(error)}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, (reasons, result), group=group)
    except RuntimeError as error:
        told = "".join(f"{reason}; " for reason in reasons.values())
        # gloo's own text names files and lines of its source; it is in the log, with the traceback.
        raise CheckpointError(
            f"{what}: {told}another rank ended, or did not answer within the limit of its group "
            f"(background writes: "
            f"twice ckpt.write_timeout_seconds; else deployment.collective_timeout_seconds)"
        ) from (failure or error)
    for of_rank, _ in everyone:
        reasons = of_rank | reasons
    if reasons:
        several = len(everyone) > 1
        told = [f"rank {rank}: {reason}" if several else reason for rank, reason in sorted(reasons.items())]
        raise CheckpointError(f"{what}: {'; '.join(told)}") from failure
    return [result for _, result in everyone]


def explain(error: BaseException) -> str:
    """One line that says what went wrong."""
    if isinstance(error, CheckpointException):
        return "; ".join(explain(cause) for cause, _ in error.failures.values())
    if isinstance(error, OSError):
        name = f" ({error.filename})" if error.filename else ""
        hint = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "the file is larger than this process or file system allows",
        }.get(error.errno or 0)
        return f"{hint or error.strerror or error}{name}"
    if isinstance(error, TailraceError):
        return str(error)
    return f"{type(error).__name__}: {error}"
