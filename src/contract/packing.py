"""Packing of samples into rows, used by SFT and RL, and dealing of rows to ranks; pure functions."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int, *, window: int = 1024) -> list[list[int]]:
    """Pack items into rows of at most `capacity`, by best fit over a window of open rows.

    Items are taken in the order given, so a shuffled order stays shuffled. Each goes into the fullest open
    row that still has room (best fit), or opens a new one; beyond `window` open rows the oldest is closed.
    Deterministic.

    Args:
        lengths: length of each item, in tokens; each in 1..capacity.
        capacity: length of a row, in tokens.
        window: most rows that are open at a time; bounds the work per item to O(log window).

    Returns:
        Rows of item indices, in the order in which rows were opened; every item is in exactly one row.

    Raises:
        ValueError: an item is empty or longer than `capacity`, or `window` is below 1.
    """
    if window < 1:
        raise ValueError(f"window = {window} leaves no row open; at least 1 is needed")
    rows: list[list[int]] = []
    # One int per open row, room * base + row index: sorts like the pair, and compares several times faster.
    open_rows: list[int] = []
    base = len(lengths) + 1
    room_of: dict[int, int] = {}  # the same rows by index, so that the oldest is found without a search
    oldest = 0
    for item, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(f"item {item} has length {length}, which does not fit into rows of {capacity}")
        place = bisect.bisect_left(open_rows, length * base)
        if place < len(open_rows):
            room, row = divmod(open_rows.pop(place), base)
            del room_of[row]
        else:
            room, row = capacity, len(rows)
            rows.append([])
            if len(open_rows) == window:
                while oldest not in room_of:
                    oldest += 1
                del open_rows[bisect.bisect_left(open_rows, room_of.pop(oldest) * base + oldest)]
        rows[row].append(item)
        if room > length:
            bisect.insort(open_rows, (room - length) * base + row)
            room_of[row] = room - length
    return rows


def pack_balanced(
    lengths: Sequence[int], capacity: int, world_size: int, *, multiple: int = 1
) -> list[list[list[int]]]:
    """Pack items into rows, and deal the rows to ranks so that all get about as many tokens.

    Several ranks take as long as the one with the most: their rows are as many as `pack` needs, rounded up to
    equally many for each, and items are spread evenly over all of them where that fits (LPT: the longest
    first, each to the emptiest row; https://doi.org/10.1137/0117039). Otherwise rows are those of `pack`, and
    are dealt by the same rule. A rank computes its rows in order. Deterministic.

    Args:
        lengths, capacity: see `pack`.
        world_size: ranks.
        multiple: the number of rows per rank is a multiple of this.

    Returns:
        [rank][row] item indices. Every rank has equally many rows, at least one, the last of them perhaps
        empty.

    Raises:
        ValueError: an item is empty or longer than `capacity`.
    """
    rows = pack(lengths, capacity)
    per_rank = -(-max(1, len(rows)) // world_size)
    per_rank = -(-per_rank // multiple) * multiple
    if world_size > 1:
        spread = _spread(lengths, world_size * per_rank)
        if all(sum(lengths[item] for item in row) <= capacity for row in spread):
            rows = [row for row in spread if row]
    dealt = _spread([sum(lengths[item] for item in row) for row in rows], world_size, per_rank)
    return [[rows[row] for row in mine] + [[] for _ in range(per_rank - len(mine))] for mine in dealt]


def _spread(lengths: Sequence[int], num_places: int, most: int | None = None) -> list[list[int]]:
    """Items by place, in order: the longest first, each to the place with the least that has room for it.

    Args:
        most: items in a place; None does not limit them.
    """
    loads = [(0, place) for place in range(num_places)]
    places: list[list[int]] = [[] for _ in range(num_places)]
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        load, place = heapq.heappop(loads)
        places[place].append(item)
        if len(places[place]) != most:
            heapq.heappush(loads, (load + lengths[item], place))
    return [sorted(items) for items in places]
