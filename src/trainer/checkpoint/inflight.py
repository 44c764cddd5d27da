"""The one save that may be in flight."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from trainer.checkpoint.writer import SaveReport


class InFlight:
    """Holds a write from its start until its result or its error is taken; nothing is lost in between."""

    def __init__(self) -> None:
        self._write: Future[SaveReport] | None = None

    def start(self, write: Callable[[], SaveReport]) -> None:
        """Run `write` on this thread, to its end. The write before it must have been taken with `take`."""
        assert self._write is None, "the previous save was never taken"
        self._write = Future()
        try:
            self._write.set_result(write())
        except Exception as error:
            self._write.set_exception(error)

    def has_failed(self) -> bool:
        """Whether an error waits to be taken."""
        return self._write is not None and self._write.done() and self._write.exception() is not None

    def take(self) -> SaveReport | None:
        """Wait for the write and return its result; None if there is none.

        Raises:
            CheckpointError: the write failed.
        """
        write, self._write = self._write, None
        return None if write is None else write.result()
