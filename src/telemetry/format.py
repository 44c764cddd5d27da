"""How quantities are written for a reader: the columns of a step, durations, a sparkline. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from telemetry.memory import format_bytes
from telemetry.metrics import Value

_BLOCKS = "▁▂▃▄▅▆▇█"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: 3725 is "1:02:05"; days lead from 24 hours on: "1d 01:02:05"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def format_count(value: float) -> str:
    """A count with three digits: 1234567 is "1.23M"; below ten thousand it is written out."""
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    for unit in ("k", "M", "B"):
        value /= 1000
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
    return f"{value / 1000:,.3g}T"


@dataclass(frozen=True, slots=True)
class Column:
    """A value of a step: its name in the metrics, its title, how it is written, and how wide that gets."""

    name: str
    title: str
    width: int
    format: Callable[[float], str]


COLUMNS = (
    Column("reward/mean", "reward", 7, lambda value: f"{value:.4f}"),
    Column("loss", "loss", 7, lambda value: f"{value:.4f}"),
    Column("entropy", "entropy", 6, lambda value: f"{value:.3f}"),
    Column("mismatch_kl", "kl", 7, lambda value: f"{value:.1e}"),
    Column("staleness/mean", "age", 4, lambda value: f"{value:.2f}"),
    Column("grad_norm", "norm", 7, lambda value: f"{value:.3g}"),
    Column("lr", "lr", 8, lambda value: f"{value:.2e}"),
    Column("tokens_per_second", "tok/s", 6, format_count),
    Column("mfu", "mfu", 6, lambda value: f"{value:.1%}"),
    Column("memory_bytes", "mem", 9, format_bytes),
    Column("eta_seconds", "eta", 7, format_duration),
    Column("epoch", "epoch", 5, lambda value: f"{value:.2f}"),
)
DETAILS = (
    Column("step_seconds", "s/step", 7, lambda value: f"{value:.2f}"),
    Column("time/data", "waiting", 7, lambda value: f"{value:.2f} s"),
    Column("length/mean", "length", 7, lambda value: f"{value:.1f}"),
    Column("groups/dropped", "dropped", 7, format_count),
)


def format_value(column: Column, value: Value) -> str:
    """`value` as the column writes it; a number that is not finite, or a string, as it is."""
    if isinstance(value, str) or value is None or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return column.format(float(value))


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` block characters, each the mean of its share of `values`; all are finite."""
    if not values or width < 1:
        return ""
    size = min(width, len(values))
    bounds = [index * len(values) // size for index in range(size + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(bounds)]
    low, spread = min(means), max(means) - min(means)
    if spread == 0:
        return _BLOCKS[0] * size
    return "".join(_BLOCKS[round((mean - low) / spread * (len(_BLOCKS) - 1))] for mean in means)
