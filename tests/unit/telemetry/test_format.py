"""How quantities are written."""

from __future__ import annotations

import pytest

from telemetry.format import format_count, format_duration, sparkline
from telemetry.memory import format_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00:00"),
        (59.6, "0:01:00"),
        (3725, "1:02:05"),
        (86399, "23:59:59"),
        (90125, "1d 01:02:05"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9999, "9,999"),
        (10_000, "10k"),
        (12_345, "12.3k"),
        (999_999, "1M"),
        (1.5e9, "1.5B"),
        (2e12, "2T"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**40, "1.0 TiB")]
)
def test_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_a_sparkline_spans_from_the_lowest_to_the_highest_block() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([7.0, 0.0], 10) == "█▁"


def test_a_long_series_is_averaged_into_the_width() -> None:
    assert sparkline([0.0, 0.0, 10.0, 10.0, 5.0, 5.0], 3) == "▁█▅"


def test_a_flat_or_empty_series_has_no_shape() -> None:
    assert sparkline([2.0, 2.0, 2.0], 10) == "▁▁▁"
    assert sparkline([], 10) == ""
