"""Which rows an update takes, and what a rank gets of them."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import ConfigError
from trainer.source.cursor import RowCursor, deal


def cursor(num_rows: int = 10, **options: Any) -> RowCursor:
    settings: dict[str, Any] = {
        "batch_size": 4,
        "micro_batch_size": 1,
        "rank": 0,
        "world_size": 1,
        "seed": 0,
        "shuffle": True,
        "max_epochs": None,
    }
    return RowCursor(num_rows, **{**settings, **options})


def take(cursor: RowCursor, steps: int) -> list[int]:
    rows: list[int] = []
    for _ in range(steps):
        share = cursor.next()
        assert share is not None
        rows += share.rows.tolist()
    return rows


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    rows = take(cursor(), 10)  # four epochs of ten rows
    epochs = [rows[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_follows_the_seed_alone() -> None:
    assert take(cursor(seed=1), 5) == take(cursor(seed=1), 5) != take(cursor(seed=2), 5)


def test_without_shuffling_rows_keep_their_order_in_every_epoch() -> None:
    assert take(cursor(num_rows=3, shuffle=False), 2) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_position_continues_the_stream_at_any_batch_size() -> None:
    whole = take(cursor(), 9)
    for taken in (4, 12, 20):
        resumed = cursor(batch_size=2)
        resumed.num_rows_taken = taken
        assert take(resumed, (36 - taken) // 2) == whole[taken:]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_ranks_share_the_rows_of_an_update_whatever_their_number(
    world_size: int, micro_batch_size: int
) -> None:
    shape = {"world_size": world_size, "micro_batch_size": micro_batch_size, "max_epochs": 1}
    ranks = [cursor(rank=rank, **shape) for rank in range(world_size)]
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    order = take(cursor(), 3)
    for rows in expected:
        shares = [rank.next() for rank in ranks]
        assert all(share is not None for share in shares)
        dealt = [
            [row for rows_ in share.micro_batches for row in rows_] for share in shares if share is not None
        ]
        shapes = {tuple(len(rows_) for rows_ in share.micro_batches) for share in shares if share is not None}
        assert len(shapes) == 1  # forward and backward are collective
        assert sorted(row for rows_ in dealt for row in rows_ if row is not None) == sorted(
            order[row] for row in rows
        )
    assert [rank.next() for rank in ranks] == [None] * world_size


def test_the_last_update_is_short_and_nothing_is_dropped_or_repeated() -> None:
    stream = cursor(num_rows=5, max_epochs=3)
    assert stream.steps_left == 4
    rows, epochs = [], []
    while (share := stream.next()) is not None:
        rows += share.rows.tolist()
        epochs.append(share.epoch)
    assert len(rows) == 15 and all(rows.count(row) == 3 for row in range(5))
    assert epochs == [0.8, 1.6, 2.4, 3.0]


def test_an_update_may_be_larger_than_the_data() -> None:
    share = cursor(num_rows=3, batch_size=8, shuffle=False).next()
    assert share is not None
    assert share.rows.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_rows_are_padded_so_that_all_ranks_get_the_same_shape() -> None:
    dealt = [deal(range(5), rank=rank, world_size=4, micro_batch_rows=2) for rank in range(4)]
    assert dealt == [((0, 4),), ((1, None),), ((2, None),), ((3, None),)]


def test_a_batch_that_cannot_be_dealt_evenly_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_size = 4 cannot be dealt evenly to 3 processes"):
        cursor(world_size=3)


def test_the_steps_left_are_counted_from_the_position_at_the_present_batch_size() -> None:
    stream = cursor(max_epochs=2)
    assert stream.steps_left == 5
    take(stream, 2)
    assert stream.steps_left == 3
    # Eight of twenty rows are taken: at another batch size the other twelve are still to come.
    wider = cursor(max_epochs=2, batch_size=8)
    wider.num_rows_taken = stream.num_rows_taken
    assert wider.steps_left == 2
    assert cursor().steps_left is None
