"""What is drawn, on a recorded console of fixed width and on a pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console as RichConsole

from telemetry.console import Console
from telemetry.metrics import Value

VALUES: dict[str, Value] = {
    "loss": 2.34567,
    "grad_norm": 1.23456,
    "lr": 1e-5,
    "tokens_per_second": 12345.6,
    "mfu": 0.3521,
    "memory_bytes": 2.5 * 2**30,
    "eta_seconds": 3725.0,
    "epoch": 0.126,
    "time/forward": 0.5,
}


def _console(width: int = 120, *, terminal: bool = False) -> tuple[RichConsole, io.StringIO]:
    output = io.StringIO()
    rich = RichConsole(file=output, width=width, force_terminal=terminal, color_system=None, highlight=False)
    return rich, output


def test_a_step_is_one_line_with_every_value_and_lines_stand_under_each_other() -> None:
    rich, output = _console(width=40)
    console = Console("run", console=rich)
    console.start(100, 1)
    console.step(1, VALUES)
    console.step(100, {**VALUES, "loss": 10.5, "tokens_per_second": 999.0, "eta_seconds": 0.0})
    first, last = output.getvalue().splitlines()
    assert first == (
        "step   1/100  loss  2.3457  norm    1.23  lr 1.00e-05  tok/s  12.3k  mfu  35.2%  mem   2.5 GiB  "
        "eta 1:02:05  epoch  0.13"
    )
    titles = r"  (loss|norm|lr|tok/s|mfu|mem|eta|epoch) "
    places = [[match.start() for match in re.finditer(titles, line)] for line in (first, last)]
    assert len(places[0]) == 8 and places[0] == places[1]


def test_a_value_that_is_missing_is_left_out_and_one_that_is_not_finite_is_shown() -> None:
    rich, output = _console()
    console = Console("run", console=rich)
    console.start(None, 1)
    console.step(1, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1, "mfu": None})
    assert output.getvalue() == "step 1/?  loss     nan  norm     inf  lr 1.00e-01\n"


def test_only_every_interval_th_step_the_first_and_the_last_are_printed() -> None:
    rich, output = _console()
    console = Console("run", interval=10, console=rich)
    console.start(25, 3)
    for step in range(3, 26):
        console.step(step, {"loss": 1.0})
    assert re.findall(r"step +(\d+)/25", output.getvalue()) == ["3", "10", "20", "25"]


def test_the_summary_has_every_section_title_and_value_and_no_markup_is_parsed() -> None:
    rich, output = _console(width=60)
    sections = {
        "model": {"name": "a [bold]model[/bold]", "layers": "30"},
        "data": {"rows": "1,200"},
        "empty": {},
    }
    Console("my run", console=rich).summary(sections)
    words = [line.split() for line in output.getvalue().splitlines() if line.strip()]
    assert words[0] == ["my", "run"]
    rows = [row for row in words[1:] if set(row[0]) != {"─"}]
    assert rows == [["model", "name", "a", "[bold]model[/bold]"], ["layers", "30"], ["data", "rows", "1,200"]]


def test_samples_stand_side_by_side_and_long_ones_are_folded_whole() -> None:
    rich, output = _console(width=60)
    long_answer = "".join(chr(ord("a") + index % 26) for index in range(90))
    rows = [{"prompt": "[red]hi[/red]", "before": "??", "after": long_answer}]
    Console("run", console=rich).sample("Samples", rows)
    shown = output.getvalue()
    assert "[red]hi[/red]" in shown and "before" in shown and "after" in shown
    assert max(len(line) for line in shown.splitlines()) <= 60
    lines = shown.splitlines()
    start = next(line.index("after") for line in lines if "after" in line)
    assert long_answer in "".join(line[start:].strip() for line in lines).replace("─", "")


def test_a_narrow_terminal_gets_fewer_values_but_never_a_folded_line() -> None:
    rich, output = _console(width=50, terminal=True)
    console = Console("run", live=False, console=rich)
    console.start(100, 1)
    console.step(1, VALUES)
    (line,) = output.getvalue().splitlines()
    assert len(line) <= 50 and line.startswith("step   1/100  loss  2.3457  norm    1.23")


def test_a_silent_console_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console.silent()
    console.summary({"model": {"name": "x"}})
    console.start(2, 1)
    console.step(1, VALUES)
    console.note("saved")
    console.finish({"loss": "1"})
    assert capsys.readouterr() == ("", "")


def test_the_terminal_is_given_back_after_an_error() -> None:
    rich, output = _console(terminal=True)
    with pytest.raises(KeyError), Console("run", live=True, console=rich) as console:
        console.start(10, 1)
        console.step(1, VALUES)
        raise KeyError
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert output.getvalue().count(hide) == output.getvalue().count(show) == 1
    assert output.getvalue().rindex(show) > output.getvalue().rindex(hide)


_PROGRAM = """
import logging, os, sys, time
os.environ.update(COLUMNS="100", LINES="30", TERM="xterm")
from telemetry.log import configure_logging
from telemetry.console import Console
configure_logging("info", rank=0, log_file=None, console=True)
with Console("my run") as console:
    console.start(20, 1)
    for step in range(1, 21):
        console.step(step, {"loss": 20.0 / step, "lr": 1e-5, "step_seconds": 0.5})
        if step == 8:
            time.sleep(0.6)
            logging.getLogger("trainer.x").warning("a log message")
            print("a print")
            console.note("a note")
    console.finish({"loss": "1.0"})
"""


def test_on_a_terminal_a_panel_is_drawn_and_messages_stand_whole_above_it() -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=terminal, stderr=terminal)
    os.close(terminal)
    chunks = []
    try:
        while chunk := os.read(controller, 65536):
            chunks.append(chunk)
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(controller)
    assert process.wait(timeout=60) == 0
    raw = b"".join(chunks).decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "\n")
    lines = [line.rstrip() for line in text.split("\n")]
    assert any(line.startswith("╭─ my run ─") and line.endswith("╮") for line in lines)
    assert any(re.match(r"│ step  8/20 ━+.* elapsed 0:00:0\d │", line) for line in lines)
    assert any(re.match(r"│ loss +█.*▁", line) for line in lines)
    assert any(re.fullmatch(r"\d\d:\d\d:\d\d warning: a log message", line) for line in lines)
    assert "a print" in lines and "a note" in lines
    assert any(line.startswith("step 20/20  loss  1.0000") for line in lines)
    # After the end of the panel the cursor is shown again.
    assert raw.rindex("\x1b[?25h") > raw.rindex("╯")
