"""The one save that may be in flight, and what all ranks together know of it.

A write ends when its thread ends: until then no other may start, because the thread may still read the
snapshot. One that does not end in time is *given up*: training goes on (or ends) without it, and it can
commit nothing but what was whole before.

Whatever made a write fail, its ranks may have left the background group at different collectives. The next
write gets a new one.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from contract.errors import CheckpointError
from trainer.checkpoint.agreement import FAILURES, explain, on_all_ranks
from trainer.checkpoint.writer import SaveReport
from trainer.hold import Hold
from trainer.parallel.process import Process

_LOOK_SECONDS = 0.05
"""How often waiting ranks look at each other: each of these collectives is short, whatever the wait."""

_GRACE_SECONDS = 30.0
"""When the write has failed on one rank, it ends on the others within moments, or their storage hangs."""


_THREAD = "checkpoint-save"


def is_writing() -> bool:
    """Whether a write of this process still runs behind it: one that was given up may run on for long."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


@dataclass(slots=True)
class _Write:
    step: int
    future: Future[SaveReport]
    hold: Hold | None
    is_given_up: bool = False

    @property
    def error(self) -> CheckpointError | None:
        """Why it has failed on this rank; None if it has not, or not yet."""
        if not self.future.done():
            return None
        error = self.future.exception()
        if error is None or isinstance(error, CheckpointError):
            return error
        failure = CheckpointError(
            f"checkpoint of step {self.step} was not saved, earlier ones are unchanged: {explain(error)}"
        )
        failure.__cause__ = error
        return failure


class InFlight:
    """Holds a write from its start until its outcome is taken; nothing is lost in between."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._write: _Write | None = None
        self._is_group_spent = False

    @property
    def is_open(self) -> bool:
        """Whether a write was started whose outcome was not taken, or that was given up and has not ended;
        the same on all ranks.
        """
        return self._write is not None

    def renew_group(self, what: str) -> None:
        """Between writes: if the one before failed, replace the background group. Collective on the control
        group, on the training thread, which alone makes groups. None may be open.

        Args:
            what: begins the message of an error.

        Raises:
            CheckpointError: a rank is lost.
        """
        assert self._write is None, "the write before may still be in a collective of the group"
        if self._is_group_spent:
            on_all_ranks(self._process.control_group, what, self._process.renew_background_group)
            self._is_group_spent = False

    def start(
        self, step: int, write: Callable[[], SaveReport], hold: Hold | None, *, in_background: bool
    ) -> Future[SaveReport]:
        """Run `write` on this thread to its end, or on one of its own. None may be open.

        Args:
            hold: given up together with the write.
        """
        assert self._write is None, "the save before is still open"
        future: Future[SaveReport] = Future()
        self._write = _Write(step, future, hold)

        def run() -> None:
            try:
                future.set_result(write())
            except BaseException as error:  # DCP's own exception is not an `Exception`
                future.set_exception(error)
                if not isinstance(error, FAILURES):
                    raise

        if in_background:
            # A daemon: a process that gives a hanging storage up must be able to end.
            threading.Thread(target=run, name=_THREAD, daemon=True).start()
        else:
            run()
        return future

    def settle(self, wait_seconds: float = 0.0) -> SaveReport | CheckpointError | None:
        """Take the outcome of the write; collective on the control group.

        Args:
            wait_seconds: how long to wait for its end; then it is given up. 0 only looks.

        Returns:
            The same kind on every rank: the report, or why it failed or was given up; None if none is open,
            a look found it not ended, or its failure was returned before.

        Raises:
            CheckpointError: another rank is lost.
        """
        write = self._write
        if write is None:
            return None
        deadline = time.monotonic() + (0.0 if write.is_given_up else wait_seconds)
        has_failed = False
        while True:
            try:
                num_ended, num_failed, num_late = self._look(write, deadline)
            except RuntimeError as error:
                raise self._lost(write, error) from error
            if num_ended == self._process.world_size:
                return self._take(write, num_failed)
            if num_failed and not has_failed and not write.is_given_up:
                has_failed = True
                deadline = time.monotonic() + _GRACE_SECONDS
            elif num_late:
                break
            concurrent.futures.wait([write.future], _LOOK_SECONDS)
        if write.is_given_up or (wait_seconds == 0 and not has_failed):
            return None
        return self._give_up(
            write,
            "failed on another rank, and does not end on this one"
            if has_failed
            else f"did not end within {wait_seconds:g} s",
        )

    def settle_alone(self, wait_seconds: float) -> SaveReport | CheckpointError | None:
        """As `settle`, of this rank alone: for when the others may be anywhere. A write that was given up is
        not waited for again.
        """
        write = self._write
        if write is None or write.is_given_up:
            return None
        concurrent.futures.wait([write.future], wait_seconds)
        if write.future.done():
            return self._take(write, num_failed=0)
        return self._give_up(write, f"did not end within {wait_seconds:g} s")

    def _look(self, write: _Write, deadline: float) -> list[float]:
        """On how many ranks it has ended, has failed, and is late."""
        is_abandoned = write.hold is not None and write.hold.was_given_up and not write.is_given_up
        has_failed = write.error is not None or is_abandoned
        is_late = time.monotonic() >= deadline
        return self._process.all_sum([float(write.future.done()), float(has_failed), float(is_late)])

    def _lost(self, write: _Write, error: RuntimeError) -> CheckpointError:
        """A rank is lost, and the run cannot go on. What the write says of that is the better message."""
        concurrent.futures.wait([write.future], _GRACE_SECONDS)
        if write.error is not None:
            self._write = None
            return write.error
        return CheckpointError(
            f"another rank ended or does not answer while the checkpoint of step {write.step} was in flight "
            f"({error})"
        )

    def _take(self, write: _Write, num_failed: float) -> SaveReport | CheckpointError | None:
        self._write = None
        # The same on all ranks, as they count the failures and give up together.
        self._is_group_spent = num_failed > 0 or write.is_given_up
        error = write.error
        if error is None and not num_failed:
            return write.future.result()
        if write.is_given_up:
            return None
        return error or CheckpointError(
            f"checkpoint of step {write.step} failed on another rank; earlier ones are unchanged"
        )

    def _give_up(self, write: _Write, reason: str) -> CheckpointError:
        write.is_given_up = True
        if write.hold is not None:
            write.hold.give_up()
        return write.error or CheckpointError(
            f"the write of the checkpoint of step {write.step} {reason}, and was given up: the storage hangs "
            f"or is too slow; earlier checkpoints are unchanged. See to the storage, or raise "
            f"ckpt.write_timeout_seconds"
        )
