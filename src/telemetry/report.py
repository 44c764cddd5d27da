"""Draws a metric of a run as an SVG: `python -m telemetry.report metrics.jsonl out.svg [--key loss]`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from contract.errors import DataError, TailraceError
from telemetry.metrics import read_metrics

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 44
_SMOOTHING = 0.85
"""Share of the past in the moving average that is drawn over the raw values."""


def read_series(path: Path, key: str) -> list[tuple[int, float]]:
    """Step and value of every step whose `key` is a number.

    Raises:
        DataError: there is none, or the file is no metrics file.
    """
    records = read_metrics(path)
    points = [(record["step"], float(record[key])) for record in records if _is_number(record.get(key))]
    if not points:
        numeric = sorted({name for record in records for name, value in record.items() if _is_number(value)})
        raise DataError(f"{path} has no numbers under {key!r}; it has: {', '.join(numeric) or 'nothing'}")
    return points


def draw_svg(points: Sequence[tuple[int, float]], *, title: str) -> str:
    """A line chart of (step, value) points with a moving average; at least one point, all finite."""
    x_ticks = _ticks(points[0][0], points[-1][0])
    values = [value for _, value in points]
    y_ticks = _ticks(min(values), max(values))
    x_low, x_high = min(points[0][0], x_ticks[0]), max(points[-1][0], x_ticks[-1])
    y_low, y_high = min(min(values), y_ticks[0]), max(max(values), y_ticks[-1])

    def place_x(step: float) -> float:
        return _LEFT + (step - x_low) / ((x_high - x_low) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def place_y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y_low) / ((y_high - y_low) or 1) * (_HEIGHT - _TOP - _BOTTOM)

    def path_of(series: Sequence[tuple[int, float]]) -> str:
        return "M" + " L".join(f"{place_x(step):.1f} {place_y(value):.1f}" for step, value in series)

    grid = []
    for tick in y_ticks:
        y = place_y(tick)
        grid.append(f'<path d="M{_LEFT} {y:.1f} H{_WIDTH - _RIGHT}" stroke="#d8dee4"/>')
        grid.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        grid.append(
            f'<text x="{place_x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{tick:g}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="#57606a">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            f'<text x="{_LEFT}" y="22" font-size="14" fill="#24292f">{escape(title)}</text>',
            *grid,
            f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>',
            f'<path d="{path_of(points)}" fill="none" stroke="#9ecbff" stroke-width="1"/>',
            f'<path d="{path_of(_smooth(points))}" fill="none" stroke="#0969da" stroke-width="2"/>',
            "</svg>",
            "",
        ]
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _smooth(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Exponential moving average, corrected for its start (as in Kingma & Ba 2015, section 3)."""
    total = weight = 0.0
    smoothed = []
    for step, value in points:
        total = _SMOOTHING * total + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append((step, total / weight))
    return smoothed


def _ticks(low: float, high: float, *, count: int = 6) -> list[float]:
    """About `count` round numbers from low to high: multiples of 1, 2 or 5 times a power of ten."""
    if low == high:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="telemetry.report", description=__doc__)
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run")
    parser.add_argument("output", type=Path, help="SVG file to write")
    parser.add_argument("--key", default="loss", help="metric to draw (default: loss)")
    parser.add_argument("--title", help="title of the chart (default: the metric)")
    options = parser.parse_args(arguments)
    try:
        points = read_series(options.metrics, options.key)
    except TailraceError as error:
        parser.exit(error.exit_code, f"Error: {error}\n")
    options.output.write_text(draw_svg(points, title=options.title or options.key), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
