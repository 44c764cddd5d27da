"""`ckpt pause` and `ckpt save-now`: ask the run that is going on in a folder, and wait for what it does.

The run sees a request at the end of a step. It is running as long as its folder is locked.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from contract import control
from contract.control import PausedMark, Request
from contract.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_PAUSED,
    EXIT_SIGNAL_BASE,
    RunFolderError,
    TailraceError,
)
from contract.layout import RunFolder
from launcher.folder import is_running

_POLL_SECONDS = 0.1
_SIGINT = 2
_TIMEOUT_SECONDS = 3600.0


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both to the parser of `ckpt`."""
    pause = commands.add_parser(
        "pause",
        help="have a running run save and end",
        description="Have the run that is going on finish its step, await the save in flight, save, and end "
        f"with exit code {EXIT_PAUSED}; --resume goes on from there. Waits for its end; Ctrl-C ends the wait "
        "and not the pause.",
    )
    pause.set_defaults(run=_pause)
    save = commands.add_parser(
        "save-now",
        help="have a running run save and go on",
        description="Have the run that is going on save at the end of its step (behind training where "
        "ckpt.async_save applies) and go on. Waits until it begins to save.",
    )
    save.set_defaults(run=_save_now)
    for command in (pause, save):
        command.add_argument("path", type=Path, metavar="run", help="run folder")
        command.add_argument("--no-wait", action="store_true", help="leave the request and return at once")
        command.add_argument(
            "--timeout",
            type=float,
            default=_TIMEOUT_SECONDS,
            metavar="SECONDS",
            help=f"longest wait (default {_TIMEOUT_SECONDS:g}); the request stands after it",
        )


def _pause(arguments: argparse.Namespace) -> int:
    folder = RunFolder(arguments.path)
    if not _ask(folder, "pause"):
        return EXIT_FAILURE
    print(
        f"asked the run in {folder.root} to pause: it finishes its step, saves, and ends with exit code "
        f"{EXIT_PAUSED}"
    )
    if arguments.no_wait:
        return EXIT_OK
    try:
        return _await_pause(folder, _Limit(folder, arguments.timeout))
    except KeyboardInterrupt:
        print("stopped waiting; the run pauses all the same", file=sys.stderr)
        return EXIT_SIGNAL_BASE + _SIGINT


def _save_now(arguments: argparse.Namespace) -> int:
    folder = RunFolder(arguments.path)
    if not _ask(folder, "save-now"):
        return EXIT_FAILURE
    print(f"asked the run in {folder.root} to save at the end of its step")
    if arguments.no_wait:
        return EXIT_OK
    try:
        return _await_answer(folder, "save-now", _Limit(folder, arguments.timeout))
    except KeyboardInterrupt:
        print("stopped waiting; the run saves all the same", file=sys.stderr)
        return EXIT_SIGNAL_BASE + _SIGINT


def _ask(folder: RunFolder, request: Request) -> bool:
    """Leave the request; False, and nothing is left, if the run ended meanwhile.

    Raises:
        RunFolderError: no run is going on there.
    """
    if not folder.root.is_dir():
        raise RunFolderError(f"{folder.root}: there is no such folder; name a run folder")
    if not is_running(folder):
        mark = control.read_paused(folder)
        state = f"it is paused already, {_describe(mark)}" if mark is not None else "nothing was asked for"
        raise RunFolderError(f"no run is going on in {folder.root}; {state}")
    control.ask(folder, request)
    return is_running(folder) or _give_up(folder, request)


class _Limit:
    """Of the time that this command waits for a run."""

    def __init__(self, folder: RunFolder, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def pause(self, state: str) -> None:
        """Before the next look at a run that is in this state.

        Raises:
            TailraceError: the time is over.
        """
        if time.monotonic() >= self._end:
            raise TailraceError(
                f"stopped waiting after {self._seconds:g} s (--timeout): the run in {self._folder.root} "
                f"{state}. The request stands; what the run does is in {self._folder.logs}/latest"
            )
        time.sleep(_POLL_SECONDS)


def _await_pause(folder: RunFolder, limit: _Limit) -> int:
    """Wait for the end of the run."""
    code = _await_answer(folder, "pause", limit)
    while code == EXIT_OK and is_running(folder):
        limit.pause("pauses, and has not ended")
    if code != EXIT_OK:
        return code
    mark = control.read_paused(folder)
    if mark is None:
        print(f"ckpt: error: the run ended, but not in a pause: see {folder.logs}/latest", file=sys.stderr)
        return EXIT_FAILURE
    print(f"paused {_describe(mark)}")
    return EXIT_OK


def _await_answer(folder: RunFolder, request: Request, limit: _Limit) -> int:
    """Wait until the run has taken the request, and print what it says."""
    while True:
        # In this order: a run that has ended answers no more.
        was_running = is_running(folder)
        reply = control.read_answer(folder, request)
        if reply is not None and reply.accepted:
            print(reply.message)
            return EXIT_OK
        if reply is not None:
            print(f"ckpt: error: refused: {reply.message}", file=sys.stderr)
            return EXIT_FAILURE
        if not was_running and request == "pause" and control.read_paused(folder) is not None:
            return EXIT_OK  # on another's request, who took the answer
        if not was_running:
            _give_up(folder, request)
            return EXIT_FAILURE
        limit.pause("has not finished its step")


def _give_up(folder: RunFolder, request: Request) -> bool:
    """Take the request back: it must not reach the next attempt. Always False."""
    control.withdraw(folder, request)
    print(f"ckpt: error: the run in {folder.root} ended before it took the request", file=sys.stderr)
    return False


def _describe(mark: PausedMark) -> str:
    saved = "which is saved" if mark.saved else "of which this attempt saved nothing"
    return f"at step {mark.step}, {saved} (by {mark.reason}, {mark.time}); go on with --resume"
