"""Log messages: to the console (rank 0, with rich) and to one file per process.

Owns the root logger's handlers and the process's one rich `Console`: everything that writes to standard
output goes through `terminal()`, because only then can a live panel and log messages share the screen.

Invariants: the file has every message of the project down to debug, and of libraries down to info, whatever
the console shows; a message of a library reaches the console from warning on; Python warnings go to the file
only. Messages are never parsed as rich markup.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import ClassVar, Literal

from rich.console import Console
from rich.text import Text

from contract.errors import Interrupted, RunFolderError, exit_code_of, is_expected

Level = Literal["debug", "info", "warning", "error"]

_OWN_PACKAGES = ("contract", "telemetry", "launcher", "trainer", "orchestrator", "inference")
# Libraries that print through handlers of their own, past the root logger.
_SELF_PRINTING = ("transformers", "datasets", "huggingface_hub", "accelerate", "torch", "wandb")

logger = logging.getLogger(__name__)

_announced: set[tuple[str, str]] = set()


@functools.cache
def terminal() -> Console:
    """The process's rich console on standard output."""
    return Console(highlight=False)


def configure_logging(level: Level, *, rank: int, log_file: Path | None, console: bool) -> None:
    """Install the handlers; a second call replaces those of the first.

    Args:
        level: least severe message of the project shown on the console; the file has all.
        rank: number of this process, written on each line of the file; only rank 0 uses the console.
        log_file: file to append to, its folder is made; None writes none.
        console: whether rank 0 shows messages at all.

    Raises:
        RunFolderError: the file cannot be opened.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.INFO)
    for package in _OWN_PACKAGES:
        logging.getLogger(package).setLevel(logging.DEBUG)
    # Without any handler, logging falls back on printing to standard error by itself.
    root.addHandler(logging.NullHandler())
    if console and rank == 0:
        root.addHandler(_ConsoleHandler(level))
    if log_file is not None:
        root.addHandler(_open_log_file(log_file, rank))
    logging.captureWarnings(True)
    adopt_libraries()


def adopt_libraries() -> None:
    """Send the messages of libraries that print by themselves through our handlers.

    They install their handlers when they are imported: call this again after importing them.
    """
    for name in _SELF_PRINTING:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def once(logger: logging.Logger, message: str, *, level: int = logging.WARNING) -> None:
    """Log `message` the first time that this process says it, and never again."""
    if (logger.name, message) not in _announced:
        _announced.add((logger.name, message))
        logger.log(level, message)


def log_to_file(
    logger: logging.Logger, message: str, *, level: int = logging.INFO, error: BaseException | None = None
) -> None:
    """Log what the console shows in another form already; `error` adds its traceback."""
    logger.log(level, "%s", message, exc_info=error, extra={"only_to_file": True})


def current_log_file() -> Path | None:
    """The file that this process logs to; None if there is none."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _FileHandler):
            return Path(handler.baseFilename)
    return None


def report_error(error: BaseException, *, debug: bool, console: Console | None = None) -> int:
    """Print the error that ends this process, and write it with its traceback to the log file.

    What the user can act on is one message; its traceback is printed only with `debug`. Anything else is a
    defect and keeps its traceback. Either way the place of the log file is named. An end by a signal is no
    error, and said in a line.

    Args:
        console: where to print; None is standard error.

    Returns:
        The exit code that belongs to the error.
    """
    console = console or Console(stderr=True, highlight=False)
    log_file = current_log_file()
    if log_file is not None:
        log_to_file(logger, "this process ends by an error", level=logging.ERROR, error=error)
    if isinstance(error, Interrupted) and not debug:  # somebody wanted this end
        console.print(Text(str(error)), soft_wrap=True)
        return error.exit_code
    expected = is_expected(error)
    if debug or not expected:
        console.print(Text("".join(traceback.format_exception(error)).rstrip()), soft_wrap=True)
    if expected:
        console.print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)
    else:
        console.print(
            Text.assemble(("Unexpected error: ", "bold red"), f"{type(error).__name__}: {error}"),
            soft_wrap=True,
        )
    if log_file is not None:
        console.print(
            Text(f"The log of this process, with the traceback: {log_file}", style="dim"), soft_wrap=True
        )
    return exit_code_of(error)


def _is_own(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in _OWN_PACKAGES


class _ConsoleHandler(logging.Handler):
    """Rank 0's messages, on the console that the live panel uses too. Lines are not folded."""

    _STYLES: ClassVar = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}

    def __init__(self, level: Level) -> None:
        super().__init__(level.upper())
        self._shows_warnings_of_python = level == "debug"
        self.setFormatter(logging.Formatter("%(message)s"))
        self.addFilter(self._is_shown)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            clock = time.strftime("%H:%M:%S", time.localtime(record.created))
            style = self._STYLES.get(record.levelname, "")
            level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
            text = Text.assemble((f"{clock} ", "dim"), (level, style), self.format(record))
            terminal().print(text, soft_wrap=True)
        except Exception:
            self.handleError(record)

    def _is_shown(self, record: logging.LogRecord) -> bool:
        if getattr(record, "only_to_file", False):
            return False
        if record.name == "py.warnings":
            return self._shows_warnings_of_python
        return _is_own(record) or record.levelno >= logging.WARNING


class _FileHandler(logging.FileHandler):
    """One process's log file. A full disk is said once, and does not end the run: the metrics file will."""

    def __init__(self, path: Path, rank: int) -> None:
        self._has_failed = False
        super().__init__(path, mode="a", encoding="utf-8", errors="backslashreplace")
        formatter = logging.Formatter(
            f"%(asctime)s.%(msecs)03d rank {rank} %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        # Machines of one run may stand in different time zones.
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._has_failed:
            self._has_failed = True
            print(f"cannot write the log file {self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr)


def _open_log_file(path: Path, rank: int) -> _FileHandler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _FileHandler(path, rank)
    except OSError as error:
        raise RunFolderError(
            f"cannot write the log file {path}: {error.strerror}; make the folder writable or choose another "
            "output_dir"
        ) from error
