"""What a run is asked for while it trains: to end, to pause, to save now; and its limit of wall-clock time.

A request reaches one rank: a signal, or a file in the run folder that rank 0 sees. `Requests.decide` makes
all of them one decision of all ranks at the end of a step, in one collective.

- SIGINT, SIGTERM: the run ends; a second one ends the process at once, and so does the end of the grace time.
  While training is not armed (start-up: nothing to save yet) the first one already ends the run.
- SIGUSR1, `ckpt pause`, `max_minutes`: the run pauses, however long its save takes. What comes during
  start-up waits for the end of start-up.
- `ckpt save-now`: the run saves and goes on.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import psutil

from contract import control
from contract.control import PAUSE_SIGNAL, Answer, Request
from contract.errors import EXIT_SIGNAL_BASE, Interrupted
from contract.layout import RunFolder
from trainer.parallel.process import Process

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTHING_TO_SAVE = "the run saves no checkpoints (--no-ckpt), so it goes on"


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do now.

    Attributes:
        ending: what asked for the end of the run, in words; empty if it goes on.
        signum: the signal that did, or 0 if the run is to pause.
        save: whether to save and go on.
    """

    ending: str = ""
    signum: int = 0
    save: bool = False


class Requests:
    """What this process was asked for and has not been decided yet.

    Attributes:
        decided: the last decision.
    """

    def __init__(
        self, folder: RunFolder | None = None, *, can_save: bool = True, max_minutes: float | None = None
    ) -> None:
        """
        Args:
            folder: where `ckpt` leaves requests; None takes none.
            can_save: without checkpoints a pause would lose what was trained, so it is refused.
            max_minutes: limit from the start of this process; it ends the run whether that can save or not.
        """
        self.signum = 0
        self.decided = Decision()
        self._folder = folder
        self._can_save = can_save
        self._max_minutes = max_minutes
        self._time_limit = math.inf if max_minutes is None else 60 * max_minutes + _start_of_process()
        self._num_pauses = 0
        self._num_pauses_decided = 0
        self._is_armed = False

    def arm(self) -> None:
        """From now on the first signal waits for the end of the step."""
        self._is_armed = True

    def agree(self, process: Process) -> int:
        """The ending signal that any rank received, or 0; for what may be cut short within a step.
        Collective on the control group.
        """
        return int(process.all_max(float(self.signum)))

    def decide(self, process: Process, step: int) -> Decision:
        """What all ranks do between steps; answers the requests that this settles. Collective on the control
        group.

        Args:
            step: updates done.
        """
        files: dict[Request, bool] = {
            name: process.is_main and self._is_asked(name) for name in control.REQUESTS
        }
        # A count, because the next SIGUSR1 may come at any time, also in the collective.
        num_pauses = self._num_pauses
        signum, by_signal, by_file, save, late = process.all_max_each(
            [
                float(self.signum),
                float(num_pauses > self._num_pauses_decided),
                float(files["pause"]),
                float(files["save-now"]),
                float(time.time() > self._time_limit),
            ]
        )
        self._num_pauses_decided = num_pauses
        if signum:
            ending = signal.Signals(int(signum)).name
        elif late:
            ending = f"max_minutes = {self._max_minutes:g}"
        elif by_file and self._can_save:
            ending = "`ckpt pause`"
        elif by_signal and self._can_save:
            ending = PAUSE_SIGNAL.name
        else:
            ending = ""
        if process.is_main:
            self._say(step, ending, is_ending_by_signal=bool(signum), is_refused=bool(by_signal or by_file))
            for request in control.REQUESTS:
                if files[request]:
                    self._answer(request, step, ending)
        self.decided = Decision(ending, int(signum), bool(save) and self._can_save and not ending)
        return self.decided

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Handler of the ending signals, on the main thread.

        Raises:
            Interrupted: training has not begun.
        """
        if self.signum:
            return
        self.signum = signum
        name = signal.Signals(signum).name
        if not self._is_armed:
            raise Interrupted(f"ended by {name} before training began", signum)
        saving = " and saving" if self._can_save else " (this run saves nothing)"
        logger.warning("%s: finishing the step%s; a second signal ends the run at once", name, saving)

    def receive_pause(self, signum: int, frame: FrameType | None) -> None:
        """Handler of SIGUSR1, on the main thread."""
        self._num_pauses += 1

    def _is_asked(self, request: Request) -> bool:
        return self._folder is not None and control.is_asked(self._folder, request)

    def _say(self, step: int, ending: str, *, is_ending_by_signal: bool, is_refused: bool) -> None:
        if ending and not is_ending_by_signal:  # a signal was spoken of when it came
            logger.warning("%s: the run pauses after step %d", ending, step)
        elif is_refused and not ending:
            logger.warning("a pause was asked for, but %s", _NOTHING_TO_SAVE)

    def _answer(self, request: Request, step: int, ending: str) -> None:
        assert self._folder is not None
        if ending:
            reply = Answer(True, f"the run ends after step {step}, by {ending}")
        elif self._can_save:
            reply = Answer(True, f"the run saves step {step} and goes on")
        else:
            reply = Answer(False, _NOTHING_TO_SAVE)
        if request == "save-now" and not ending:
            logger.info("`ckpt save-now`: %s", reply.message)
        try:
            control.answer(self._folder, request, reply)
        except OSError as error:
            logger.warning("`ckpt %s` cannot be answered: %s", request, error)


@contextmanager
def handle_signals(
    requests: Requests, on_immediate_end: Callable[[int, str], None], *, grace_seconds: float | None = None
) -> Iterator[None]:
    """Install the handlers for the time inside. On the main thread.

    Args:
        on_immediate_end: called with the exit code and its reason before the process ends at once.
        grace_seconds: from the first ending signal to the end of the process, if it has not ended by itself;
            None waits for ever.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handlers = {PAUSE_SIGNAL: requests.receive_pause} | dict.fromkeys(_SIGNALS, requests.receive)
    previous = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A thread, because Python runs handlers between bytecodes only: a main thread that hangs in a collective
    # would never get to see the second signal.
    watcher = threading.Thread(
        target=_watch, args=(reader, on_immediate_end, grace_seconds), name="signals", daemon=True
    )
    watcher.start()
    try:
        with control.letting_pause_signal_through():
            yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        os.close(writer)
        watcher.join(timeout=5)
        os.close(reader)


def _watch(reader: int, on_immediate_end: Callable[[int, str], None], grace_seconds: float | None) -> None:
    """Wait for the second ending signal, or for the end of the grace time that begins with the first."""
    kill_at = math.inf
    count = 0
    while True:
        wait = None if math.isinf(kill_at) else max(0.0, kill_at - time.monotonic())
        if not select.select([reader], [], [], wait)[0]:
            reason = f"the run did not end within {grace_seconds:g} s after a signal (ckpt.grace_seconds)"
            # Not through the logging or the console, whose locks the main thread may hold.
            os.write(2, f"{reason}; the last committed checkpoint stands\n".encode())
            # Not the code of a run whose state was saved.
            _end(EXIT_SIGNAL_BASE + signal.SIGKILL, reason, on_immediate_end)
        data = os.read(reader, 1)
        if not data:
            return
        count += data[0] in _SIGNALS
        if count == 2:
            _end(EXIT_SIGNAL_BASE + data[0], "ended at once by a second signal", on_immediate_end)
        if count and grace_seconds is not None and math.isinf(kill_at):
            kill_at = time.monotonic() + grace_seconds


def _end(code: int, reason: str, on_immediate_end: Callable[[int, str], None]) -> NoReturn:
    try:
        on_immediate_end(code, reason)
    finally:
        os._exit(code)


def _start_of_process() -> float:
    """Seconds since the epoch."""
    return psutil.Process().create_time()
