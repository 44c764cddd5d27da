"""Signals: the first asks for an orderly end at the end of the step, the second ends the process at once.

A signal reaches one rank or all; `StopRequest.agree` makes it a decision of all ranks. While training is not
armed (start-up: nothing to save yet) the first signal already ends the run.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from contract.errors import EXIT_SIGNAL_BASE, Interrupted
from trainer.parallel.process import Process

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The first signal this process received, if any."""

    def __init__(self) -> None:
        self.signum = 0
        self._is_armed = False

    def arm(self) -> None:
        """From now on the first signal waits for the end of the step."""
        self._is_armed = True

    def agree(self, process: Process) -> int:
        """The signal that any rank received, or 0; collective on the control group."""
        return int(process.all_max(float(self.signum)))

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler of the main thread.

        Raises:
            Interrupted: training has not begun.
        """
        if self.signum:
            return
        self.signum = signum
        name = signal.Signals(signum).name
        if not self._is_armed:
            raise Interrupted(f"ended by {name} before training began", signum)
        logger.warning("%s: finishing the step and saving; a second signal ends the run at once", name)


@contextmanager
def handle_signals(on_immediate_end: Callable[[int], None]) -> Iterator[StopRequest]:
    """Install the handlers for the time inside.

    Args:
        on_immediate_end: called with the exit code before the process ends at a second signal.
    """
    request = StopRequest()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = {signum: signal.signal(signum, request.receive) for signum in _SIGNALS}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A thread, because Python runs handlers between bytecodes only: a main thread that hangs in a collective
    # would never get to see the second signal.
    watcher = threading.Thread(target=_watch, args=(reader, on_immediate_end), name="signals", daemon=True)
    watcher.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(previous_fd)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        os.close(writer)
        watcher.join(timeout=5)
        os.close(reader)


def _watch(reader: int, on_immediate_end: Callable[[int], None]) -> None:
    count = 0
    while data := os.read(reader, 1):
        if data[0] not in _SIGNALS:
            continue
        count += 1
        if count == 2:
            code = EXIT_SIGNAL_BASE + data[0]
            try:
                on_immediate_end(code)
            finally:
                os._exit(code)
