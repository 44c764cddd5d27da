"""The one save that may be in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from trainer.checkpoint.writer import SaveReport


class InFlight:
    """Holds a write from its start until its result or its error is taken; nothing is lost in between."""

    def __init__(self) -> None:
        self._write: Future[SaveReport] | None = None

    def start(self, write: Callable[[], SaveReport], *, in_background: bool) -> Future[SaveReport]:
        """Run `write` on this thread to its end, or on one of its own. The write before must have been
        taken.
        """
        assert self._write is None, "the previous save was never taken"
        future: Future[SaveReport] = Future()
        self._write = future

        def run() -> None:
            try:
                future.set_result(write())
            except BaseException as error:  # DCP's own exception is not an `Exception`
                future.set_exception(error)

        if in_background:
            # A daemon: a process that gives a hanging storage up must be able to end.
            threading.Thread(target=run, name="checkpoint-save", daemon=True).start()
        else:
            run()
        return future

    @property
    def is_open(self) -> bool:
        """Whether a write was started and not taken."""
        return self._write is not None

    @property
    def is_done(self) -> bool:
        """Whether a write waits to be taken that has ended, with a result or an error."""
        return self._write is not None and self._write.done()

    @property
    def has_failed(self) -> bool:
        """Whether an error waits to be taken."""
        return self._write is not None and self._write.done() and self._write.exception() is not None

    def take(self, timeout_seconds: float | None = None) -> SaveReport | None:
        """Wait for the write and return its result; None if there is none.

        Raises:
            CheckpointError: the write failed.
            TimeoutError: it did not end in time; it stays in flight.
        """
        if self._write is None:
            return None
        try:
            return self._write.result(timeout_seconds)
        finally:
            if self._write.done():
                self._write = None
