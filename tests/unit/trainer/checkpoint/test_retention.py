"""Which steps are deleted, against a list counted by hand."""

from __future__ import annotations

import pytest

from trainer.checkpoint.retention import steps_to_delete


@pytest.mark.parametrize(
    ("committed", "keep_last", "keep_interval", "protect", "deleted"),
    [
        ([20, 40, 60], None, None, (), []),
        ([20, 40, 60, 80], 3, None, (), [20]),
        ([80, 20, 100, 40, 60], 3, None, (), [20, 40]),
        ([100, 120, 140, 160, 180], 2, 100, (), [120, 140]),
        ([100, 120, 180, 200], 2, 100, (), [120]),
        ([20, 40, 60], 1, None, (20,), [40]),
        ([5], 1, None, (), []),
        ([], 1, 10, (), []),
        ([9, 10, 100], 2, None, (), [9]),
    ],
)
def test_the_newest_and_the_multiples_of_the_interval_are_kept(
    committed: list[int],
    keep_last: int | None,
    keep_interval: int | None,
    protect: tuple[int, ...],
    deleted: list[int],
) -> None:
    assert steps_to_delete(committed, keep_last, keep_interval, protect) == deleted
