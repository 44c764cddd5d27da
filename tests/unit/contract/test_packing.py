"""Packing of items into rows."""

from __future__ import annotations

import random
import time

import pytest

from contract.packing import pack, pack_balanced


def pack_slowly(lengths: list[int], capacity: int, window: int) -> list[list[int]]:
    """The same rule, as plainly as it can be said."""
    rows: list[list[int]] = []
    open_rows: list[int] = []
    room: dict[int, int] = {}
    for item, length in enumerate(lengths):
        fitting = [row for row in open_rows if room[row] >= length]
        if fitting:
            row = min(fitting, key=lambda row: (room[row], row))
        else:
            if len(open_rows) == window:
                open_rows.remove(min(open_rows))
            row = len(rows)
            rows.append([])
            open_rows.append(row)
            room[row] = capacity
        rows[row].append(item)
        room[row] -= length
        if room[row] == 0:
            open_rows.remove(row)
    return rows


@pytest.mark.parametrize("window", [1, 2, 7, 1024])
@pytest.mark.parametrize("longest", [3, 20, 32])
def test_rows_equal_those_of_the_plain_rule(window: int, longest: int) -> None:
    generator = random.Random(window * 100 + longest)
    for _ in range(20):
        lengths = [generator.randint(1, longest) for _ in range(generator.randint(1, 120))]
        assert pack(lengths, 32, window=window) == pack_slowly(lengths, 32, window)


def test_every_item_is_in_one_row_and_no_row_is_too_long() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, 100) for _ in range(5000)]
    rows = pack(lengths, 100)
    assert sorted(item for row in rows for item in row) == list(range(5000))
    assert max(sum(lengths[item] for item in row) for row in rows) <= 100
    assert sum(lengths) / (100 * len(rows)) > 0.97


def test_an_item_goes_into_the_fullest_row_that_has_room() -> None:
    assert pack([6, 7, 3, 4], 10) == [[0, 3], [1, 2]]


def test_no_items_make_no_rows() -> None:
    assert pack([], 10) == []


@pytest.mark.parametrize("length", [0, 11])
def test_an_item_that_cannot_be_placed_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match=f"item 1 has length {length}, which does not fit into rows of 10"):
        pack([1, length], 10)


def test_a_window_without_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="window = 0"):
        pack([1], 10, window=0)


def test_time_per_item_does_not_grow_with_the_window() -> None:
    lengths = [
        600 + index * 7919 % 425 for index in range(50_000)
    ]  # no two fit together: the window stays full
    started = time.process_time()
    assert len(pack(lengths, 1024)) == 50_000
    assert time.process_time() - started < 2.0  # measured 0.1; a search of the window takes 3.5


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2])
def test_every_rank_gets_equally_many_rows_and_about_as_many_tokens(world_size: int, multiple: int) -> None:
    generator = random.Random(world_size)
    for _ in range(30):
        lengths = [generator.randint(1, 32) for _ in range(generator.randint(0, 60))]
        ranks = pack_balanced(lengths, 32, world_size, multiple=multiple)
        assert sorted(item for rows in ranks for row in rows for item in row) == list(range(len(lengths)))
        assert len({len(rows) for rows in ranks}) == 1
        assert len(ranks[0]) >= 1 and len(ranks[0]) % multiple == 0
        assert all(sum(lengths[item] for item in row) <= 32 for rows in ranks for row in rows)
        loads = [sum(lengths[item] for row in rows for item in row) for rows in ranks]
        # No rank is behind another by more than the longest row.
        assert max(loads) - min(loads) <= 32
        assert pack_balanced(lengths, 32, world_size, multiple=multiple) == ranks


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_no_rank_stands_idle_because_the_samples_fit_into_fewer_rows(world_size: int) -> None:
    generator = random.Random(0)
    for num_samples in (8, 50, 200):
        lengths = [generator.randint(20, 100) for _ in range(num_samples)]
        ranks = pack_balanced(lengths, 1000, world_size)
        loads = [sum(lengths[item] for row in rows for item in row) for rows in ranks]
        assert max(loads) - min(loads) <= max(lengths)
        # As many rows as it takes and no more: spreading does not lengthen the step.
        assert len(ranks[0]) == -(-len(pack(lengths, 1000)) // world_size)


def test_rows_that_cannot_be_spread_are_packed() -> None:
    # 39 tokens for four rows of 10: the longest first, each to the emptiest row, leaves no room for the last.
    lengths = [5, 2, 4, 6, 8, 5, 4, 2, 3]
    ranks = pack_balanced(lengths, 10, 2)
    assert sorted(sorted(row) for rows in ranks for row in rows) == sorted(map(sorted, pack(lengths, 10)))


def test_one_rank_keeps_the_order_of_the_rows() -> None:
    lengths = [20, 20, 9, 31, 3]
    assert pack_balanced(lengths, 32, 1) == [pack(lengths, 32)]
