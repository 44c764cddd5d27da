"""What a user sees on the terminal: the start-up summary, the steps, samples, the end.

Owns what is drawn on `telemetry.log.terminal()`. Steps are one aligned line each, or, on a terminal, a live
panel below which nothing else is printed: messages of the log and notes scroll above it.

Values of a step are looked up by these names; a missing one or None is left out, other names are ignored:

    reward/mean        mean over the step's episodes (RL)
    loss               mean over the step's trainable tokens
    entropy            of the policy at the sampled tokens, in nats (RL)
    mismatch_kl        KL divergence of the trainer's policy from the sampler's (RL)
    staleness/mean     versions by which the sampled tokens are old (RL)
    grad_norm          L2 norm over all parameters, before clipping
    lr                 learning rate
    tokens_per_second  over all ranks
    mfu                share of the peak, 0 to 1
    memory_bytes       held on the device (or by the process, on a CPU), most of any rank
    eta_seconds        time left, in seconds
    epoch              passes over the data
    step_seconds       time of the step, in seconds (panel only, as are the next)
    time/data          the part of it in which the step waited for its batch
    length/mean        tokens of an episode (RL)
    groups/dropped     tasks whose episodes were not trained on (RL)
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from telemetry.format import COLUMNS, DETAILS, format_duration, format_value, sparkline
from telemetry.log import adopt_libraries, log_to_file, terminal
from telemetry.metrics import Value

logger = logging.getLogger(__name__)

_REFRESHES_PER_SECOND = 2
_CURVES = {"reward/mean": "reward", "loss": "loss"}
"""Values of which the panel shows the curve, and their titles: the first that a step has."""
_CURVE_LEN = 512


class Console:
    """The terminal of one run. A context manager: leaving it gives the terminal back, also after an error."""

    def __init__(
        self, title: str, *, live: bool | None = None, interval: int = 1, console: RichConsole | None = None
    ) -> None:
        """Prints nothing yet.

        Args:
            title: name of the run.
            live: a live panel in place of a line per step; None where the console is a terminal.
            interval: steps between lines; the panel shows every step.
            console: where to draw; None is the process's `terminal()`.
        """
        self._title = title
        self._console = console or terminal()
        self._is_live = self._console.is_terminal if live is None else live
        self._interval = interval
        self._live: Live | None = None
        # The panel is drawn by a thread of rich.
        self._lock = threading.Lock()
        self._total_steps: int | None = None
        self._first_step = 1
        self._step = 0
        self._values: Mapping[str, Value] = {}
        self._curve: deque[float] = deque(maxlen=_CURVE_LEN)
        self._curve_title = ""
        self._start_time = time.monotonic()

    @classmethod
    def silent(cls) -> Console:
        """A console that shows nothing, for the ranks other than 0."""
        return cls("", live=False, console=RichConsole(quiet=True))

    def summary(self, sections: Mapping[str, Mapping[str, str]]) -> None:
        """Print what the run is about to do: section -> title -> value. Empty sections are left out."""
        table = Table(
            box=box.SIMPLE_HEAD, title=self._title, title_justify="left", show_header=False, pad_edge=False
        )
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for section, rows in sections.items():
            for index, (title, value) in enumerate(rows.items()):
                is_last = index == len(rows) - 1
                table.add_row(
                    Text(section if index == 0 else ""), Text(title), Text(value), end_section=is_last
                )
        self._console.print(table)

    def start(self, total_steps: int | None, first_step: int) -> None:
        """Begin with the steps.

        Args:
            total_steps: step at which the run ends; None if it is not known.
            first_step: step that is done first, from 1.
        """
        self._total_steps, self._first_step, self._step = total_steps, first_step, first_step - 1
        self._start_time = time.monotonic()
        if self._is_live:
            # A library's own handler would print across the panel.
            adopt_libraries()
            self._live = Live(
                get_renderable=self._panel,
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()

    def step(self, step: int, values: Mapping[str, Value]) -> None:
        """Show a completed step (see the names above)."""
        name = next((name for name in _CURVES if values.get(name) is not None), "loss")
        value = values.get(name)
        with self._lock:
            self._step, self._values, self._curve_title = step, dict(values), _CURVES[name]
            if isinstance(value, int | float) and math.isfinite(value):
                self._curve.append(float(value))
        is_due = step % self._interval == 0 or step in (self._first_step, self._total_steps)
        if self._live is None and is_due:
            self._print_step(values)

    def note(self, text: str) -> None:
        """Show a line about the run: a saved checkpoint, a validation loss, an export."""
        log_to_file(logger, text)
        self._print_line(Text(text, style="green"))

    def sample(self, title: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Print texts of the model as a table; the keys of the first row are its columns."""
        if not rows:
            return
        table = _table(title, show_lines=True)
        for column in rows[0]:
            table.add_column(Text(column), overflow="fold", ratio=1)
        for row in rows:
            table.add_row(*(Text(row.get(column, "")) for column in rows[0]))
        self._console.print(table)

    def finish(self, summary: Mapping[str, str], *, heading: str = "Done") -> None:
        """End with the steps and print what came of the run: title -> value."""
        self.close()
        table = Table(
            box=box.SIMPLE_HEAD, title=heading, title_justify="left", show_header=False, pad_edge=False
        )
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for title, value in summary.items():
            table.add_row(Text(title), Text(value))
        self._console.print(table)

    def close(self) -> None:
        """Take the panel away and leave its last state as a line. Does nothing if there is none."""
        live, self._live = self._live, None
        if live is None:
            return
        live.stop()
        if self._values:
            self._print_step(self._values)

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _print_step(self, values: Mapping[str, Value]) -> None:
        parts = [self._step_text(), *_cells(values)]
        line = Text("  ").join(parts)
        # A folded line is unreadable; metrics.jsonl has what a narrow terminal has no room for.
        while self._console.is_terminal and line.cell_len > self._console.width and len(parts) > 2:
            parts.pop()
            line = Text("  ").join(parts)
        self._print_line(line)

    def _print_line(self, text: Text) -> None:
        # Lines of a log file or a pipe are never folded.
        self._console.print(text, soft_wrap=True)

    def _step_text(self) -> Text:
        total = "?" if self._total_steps is None else str(self._total_steps)
        return Text(f"step {self._step:>{len(total)}}/{total}", style="bold")

    def _panel(self) -> RenderableType:
        with self._lock:
            step_text = self._step_text()
            values, curve, curve_title = self._values, list(self._curve), self._curve_title
            done = self._step - self._first_step + 1
        width = max(20, self._console.width - 4)
        elapsed = format_duration(time.monotonic() - self._start_time)
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(
            total=None if self._total_steps is None else max(1, self._total_steps),
            completed=self._step,
            pulse=self._total_steps is None or done == 0,
        )
        head.add_row(step_text, bar, Text(f"elapsed {elapsed}", style="dim"))
        parts: list[RenderableType] = [head, _value_grid(values, width)]
        if len(curve) > 1:
            line = sparkline(curve, width - len(curve_title) - 1)
            parts.append(Text.assemble((f"{curve_title} ", "dim"), (line, "cyan")))
        return Panel(Group(*parts), title=Text(self._title), title_align="left", border_style="blue")


def _table(title: str, *, show_header: bool = True, show_lines: bool = False) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        title=Text(title, style="bold"),
        title_justify="left",
        show_header=show_header,
        show_lines=show_lines,
        pad_edge=False,
    )


def _cells(values: Mapping[str, Value]) -> list[Text]:
    """The columns of a line; widths are fixed, so that lines stand under each other."""
    cells = []
    for column in COLUMNS:
        value = values.get(column.name)
        if value is not None:
            shown = format_value(column, value).rjust(column.width)
            cells.append(Text.assemble((f"{column.title} ", "dim"), shown))
    return cells


def _value_grid(values: Mapping[str, Value], width: int) -> Table:
    """All values, in as many columns as fit."""
    cell_width = 26
    num_columns = max(1, width // cell_width)
    grid = Table.grid(padding=(0, 1))
    for _ in range(num_columns):
        grid.add_column(width=cell_width - 1, no_wrap=True)
    cells = [
        Text.assemble((f"{column.title:<9} ", "dim"), format_value(column, value))
        for column in (*COLUMNS, *DETAILS)
        if (value := values.get(column.name)) is not None
    ]
    for start in range(0, len(cells), num_columns):
        grid.add_row(*cells[start : start + num_columns])
    return grid
