"""The first moments of a process: the form of every entry point.

Reading the libraries of a command takes a while on a busy machine. A signal in that time must neither show
where it struck nor end a process that cannot answer yet; and no handler may raise meanwhile: a library
swallows what is raised in the middle of its import, or fails in its own way. So a module with an entry point
imports next to nothing, and the rest in the two ways that are here.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec

from contract.control import holding_pause_signal
from contract.errors import EXIT_SIGNAL_BASE

P = ParamSpec("P")


def entry_point(*, before: str = "") -> Callable[[Callable[[], Callable[P, int]]], Callable[P, int]]:
    """Make an entry point of a function that imports what does the work, and returns it. The work returns the
    exit code of the process.

    SIGUSR1 is held back (see `control`), and Ctrl-C is one message and the exit code 130, until the work
    takes these signals over. On the main thread.

    Args:
        before: completes the message "ended by SIGINT before ..."; what has not begun as long as the work
            leaves SIGINT alone. Empty for work that always does.
    """
    message = f"ended by SIGINT before {before}" if before else "ended by SIGINT"
    code = EXIT_SIGNAL_BASE + signal.SIGINT

    def end(signum: int, frame: FrameType | None) -> None:
        os.write(2, f"{message}\n".encode())
        os._exit(code)

    def decorate(load: Callable[[], Callable[P, int]]) -> Callable[P, int]:
        @functools.wraps(load)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                with holding_pause_signal():
                    earlier = signal.signal(signal.SIGINT, end)
                    try:
                        work = load()
                    finally:
                        signal.signal(signal.SIGINT, earlier)
                    return work(*args, **kwargs)
            except KeyboardInterrupt:
                # An impatient second one would strike while the interpreter ends, which takes a while, too.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                print(message, file=sys.stderr)
                return code

        return run

    return decorate


@contextmanager
def undisturbed_import() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back for the time inside, in which libraries are imported by a process that has
    something to do when it is told to end. Main thread only.
    """
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
