"""What the launcher of an RL run shows: the trainer's console, what others have to say, and all states.

On a terminal a panel with one row per part stays below the lines; elsewhere there are only lines. The
numbers of a row are those that a part leaves in `ATTEMPT/PART.status.json` (a flat object), the trainer's
those of the last line of the metrics.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from launcher.output import Tail
from launcher.running import SERVER, TRAINER, RunningPart

if TYPE_CHECKING:
    from rich.table import Table

_REFRESH_SECONDS = 0.5
_METRICS_BYTES = 65536
_IMPORTANT = re.compile(r"\b(warning|error|critical)\b", re.IGNORECASE)
"""Of the policy server's output only such lines are shown; the rest is in its log."""
_SHOWN_METRICS = {"step": "step", "reward/mean": "reward", "loss": "loss", "tokens_per_second": "tokens/s"}


class Screen(Protocol):
    """Where lines go."""

    def line(self, text: str) -> None:
        """Show one line."""
        ...

    def refresh(self, rows: Mapping[str, tuple[str, str, str]]) -> None:
        """Show the state of all parts: name -> state, process id, numbers."""
        ...

    def close(self) -> None:
        """Give the terminal back."""
        ...


class PlainScreen:
    """Lines only."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def refresh(self, rows: Mapping[str, tuple[str, str, str]]) -> None:
        pass

    def close(self) -> None:
        pass


class LiveScreen:
    """A panel below the lines."""

    def __init__(self) -> None:
        from rich.live import Live

        from telemetry.log import terminal

        self._console = terminal()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def line(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def refresh(self, rows: Mapping[str, tuple[str, str, str]]) -> None:
        self._live.update(_table(rows), refresh=True)

    def close(self) -> None:
        self._live.stop()


class View:
    """The console of one run. `update` is called often; `close` shows what is left."""

    def __init__(self, attempt_dir: Path, metrics: Path, *, live: bool | None) -> None:
        """
        Args:
            metrics: the run's metrics file.
            live: a panel; None where standard output is a terminal.
        """
        self._attempt_dir = attempt_dir
        self._metrics = metrics
        self._screen: Screen = (
            LiveScreen() if (sys.stdout.isatty() if live is None else live) else PlainScreen()
        )
        self._tails: dict[str, Tail] = {}
        self._states: dict[str, str] = {}
        self._refreshed = -math.inf
        self._is_closed = False

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._screen.line(text)

    def state(self, name: str, state: str) -> None:
        """What a part does now, in a word."""
        self._states[name] = state

    def update(self, parts: list[RunningPart], *, at_end: bool = False) -> None:
        """Show what was added since the last call."""
        for part in parts:
            name = part.spec.name
            tail = self._tails.setdefault(name, Tail(part.log))
            for line in tail.lines(at_end=at_end or not part.is_running):
                if name == TRAINER:
                    self._screen.line(line)
                elif name != SERVER or _IMPORTANT.search(line):
                    self._screen.line(f"[{name}] {line}")
        if time.monotonic() - self._refreshed >= _REFRESH_SECONDS:
            self._refreshed = time.monotonic()
            self._screen.refresh({part.spec.name: self._row(part) for part in parts})

    def close(self, parts: list[RunningPart]) -> None:
        """Show the rest and give the terminal back."""
        if not self._is_closed:
            self.update(parts, at_end=True)
            self._screen.close()
            self._is_closed = True

    def _row(self, part: RunningPart) -> tuple[str, str, str]:
        code = part.code
        state = self._states.get(part.spec.name, "running") if code is None else f"ended ({code})"
        if part.spec.name == TRAINER:
            values = _last_metrics(self._metrics)
            shown = {title: values[name] for name, title in _SHOWN_METRICS.items() if name in values}
        else:
            shown = _read_status(self._attempt_dir / f"{part.spec.name}.status.json")
        return state, str(part.pid), "  ".join(f"{name} {_number(value)}" for name, value in shown.items())


def _read_status(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _last_metrics(path: Path) -> dict[str, Any]:
    """The last whole line of the metrics; empty if there is none."""
    with suppress(OSError, ValueError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - _METRICS_BYTES))
        lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1]) if lines else {}
    return {}


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _table(rows: Mapping[str, tuple[str, str, str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("part", "state", "process", "numbers"):
        table.add_column(column, no_wrap=column != "numbers")
    for name, row in rows.items():
        table.add_row(name, *row)
    return table
