"""The console of a command: nothing that happens to it ends a run."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from launcher import rl_run, sft_run
from launcher.output import lasting_console

_RUN = """
max_steps = 3
[model]
name = "some/model"
"""
_RL = (
    _RUN
    + """
[[sources]]
environment = "sort-letters"
"""
)
_SFT = (
    _RUN
    + """
[data]
path = "rows.jsonl"
"""
)


@contextmanager
def _broken_pipe(encoding: str = "utf-8") -> Iterator[io.TextIOWrapper]:
    """A text stream that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.TextIOWrapper(io.FileIO(writer, "w"), encoding=encoding, line_buffering=True)
    with stream:
        yield stream


@pytest.mark.parametrize(("run", "text"), [(rl_run.run, _RL), (sft_run.run, _SFT)], ids=["rl", "sft"])
def test_a_command_whose_output_nobody_reads_does_all_its_work(
    run: Callable[[list[str]], int], text: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(text)
    words = ["@", str(tmp_path / "run.toml"), "--output-dir", str(tmp_path), "--run-name", "x", "--dry-run"]
    with _broken_pipe() as stream, redirect_stdout(stream):
        assert run(words) == 0
    assert [*(tmp_path / "x" / "config").iterdir()]


def test_a_console_that_is_gone_is_told_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    with _broken_pipe() as stream, redirect_stdout(stream), lasting_console():
        for _ in range(3):
            print("a line")
    assert capfd.readouterr().err.count("Broken pipe") == 1


def test_nothing_is_told_where_errors_go_the_same_way() -> None:
    with _broken_pipe() as stream, redirect_stdout(stream), redirect_stderr(stream), lasting_console():
        print("a line")
        print("an error", file=sys.stderr)


def test_a_console_that_was_never_open_takes_everything() -> None:
    with redirect_stdout(None), lasting_console():
        print("a line", flush=True)
        assert not sys.stdout.isatty()


def test_letters_that_the_console_does_not_have_are_replaced(tmp_path: Path) -> None:
    with (
        open(tmp_path / "out", "w", encoding="ascii") as stream,
        redirect_stdout(stream),
        lasting_console(),
    ):
        print("step 1 \u2192 2")
    assert (tmp_path / "out").read_text() == "step 1 ? 2\n"


def test_a_slow_reader_of_a_pipe_that_does_not_wait_loses_lines_and_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(writer, "w")), encoding="utf-8") as stream,
        redirect_stdout(stream),
        lasting_console(),
    ):
        for _ in range(3000):
            print("x" * 99)
    with open(reader, "rb") as read:
        assert read.read().startswith(b"x" * 99 + b"\n")


def test_a_terminal_without_a_width_gets_one() -> None:
    ours, theirs = pty.openpty()  # of 0 columns
    program = "from launcher.output import console_width; print(console_width())"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    subprocess.run([sys.executable, "-c", program], stdout=theirs, env=environment, check=True)
    assert os.read(ours, 100).split() == [b"120"]
    os.close(ours)
    os.close(theirs)


def test_a_console_that_works_shows_everything_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with lasting_console():
        print("inside")
    print("after")
    assert capfd.readouterr().out == "before\ninside\nafter\n"
