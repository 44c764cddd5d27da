"""Which committed steps are deleted."""

from __future__ import annotations

from collections.abc import Collection


def steps_to_delete(
    committed: Collection[int],
    keep_last: int | None,
    keep_interval: int | None,
    protect: Collection[int] = (),
) -> list[int]:
    """Steps to delete, ascending.

    Kept are the newest `keep_last` committed steps (all, if None), every step divisible by `keep_interval`,
    and those in `protect`. A step divisible by `keep_interval` counts among the newest while it is one of
    them, so that what is on the disk beside the steps kept for ever never exceeds `keep_last`.
    """
    if keep_last is None:
        return []
    newest = set(sorted(committed)[-keep_last:])
    return [
        step
        for step in sorted(committed)
        if step not in newest and step not in protect and not (keep_interval and step % keep_interval == 0)
    ]
