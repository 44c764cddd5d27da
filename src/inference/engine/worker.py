"""The thread that computes: it steps the scheduler, and between steps does what it is told.

Owns the scheduler from `start` on: everything that touches it is a command that this thread runs. Whatever
goes wrong here ends all requests and every later one; nothing is swallowed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from contract.errors import PolicyServerError
from contract.policy import PauseMode
from inference.engine.base import Drawn
from inference.engine.scheduler import Scheduler
from inference.engine.sequence import Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")
Delivery = list[tuple[Sequence, Drawn | Exception]]

_DELIVERY_SECONDS = 0.02
"""Tokens of sequences that go on are delivered so often: with each step, those who wait for them would take
the interpreter from a small model."""


class Worker:
    """Runs a scheduler in a thread of its own.

    Pauses have holders, as a weight update pauses on its own account: drawing goes on when none is left.
    """

    def __init__(self, scheduler: Scheduler, deliver: Callable[[Delivery], None]) -> None:
        """Args:
        deliver: takes what was drawn, in this thread.
        """
        self._scheduler = scheduler
        self._deliver = deliver
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        # Guards `failure` together with the queue: no command may be added that nobody will run.
        self._lock = threading.Lock()
        self._holds: dict[str, PauseMode] = {}
        self._quiet_waiters: list[tuple[str, Future[None]]] = []
        self._delivered_at = 0.0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: PolicyServerError | None = None

    @property
    def is_paused(self) -> bool:
        """Whether a pause is in force."""
        return bool(self._holds)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two steps. If it raises, the engine has failed."""
        future: Future[T] = Future()
        with self._lock:
            if self.failure is not None:
                future.set_exception(self.failure)
            else:
                self._commands.put((function, future))
        return future

    def submit(self, sequence: Sequence) -> None:
        """Let `sequence` be drawn."""
        self.call(lambda: self._scheduler.submit(sequence))

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants `sequence` any more: its slot is freed before the next step."""
        sequence.is_cancelled = True
        self.call(self._scheduler.drop_cancelled)

    def hold(self, holder: str, mode: PauseMode) -> Future[None]:
        """Admit nothing, and stop drawing in the way of `mode`, until `release`. The result is there when
        nothing is being drawn: with `wait`, that is also where another holder stopped what was to be
        finished.
        """
        quiet: Future[None] = Future()

        def begin() -> None:
            # A stricter pause of the same holder stays: nothing is drawn after it has returned.
            if self._holds.get(holder, "wait") == "wait":
                self._holds[holder] = mode
            if mode == "abort":
                self._scheduler.abort()
            self._quiet_waiters.append((holder, quiet))

        _chain(self.call(begin), quiet)
        return quiet

    def release(self, holder: str) -> Future[None]:
        """End the pause of `holder`; nothing happens if there is none."""

        def end() -> None:
            self._holds.pop(holder, None)
            overtaken = [waiter for name, waiter in self._quiet_waiters if name == holder]
            self._quiet_waiters = [pair for pair in self._quiet_waiters if pair[0] != holder]
            for waiter in overtaken:
                waiter.set_exception(PolicyServerError("the engine was resumed before the pause had begun"))

        return self.call(end)

    def close(self, timeout_seconds: float) -> None:
        """End all sequences (`abort`) and the thread. Blocks until it has ended.

        Raises:
            PolicyServerError: the thread does not end in time.
        """

        def end() -> None:
            self._scheduler.abort(waiting=True)
            self._is_closing = True

        self.call(end)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise PolicyServerError(f"the engine's thread has not ended after {timeout_seconds:g} s")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_commands()
                if self._has_work():
                    self._scheduler.step(admit=not self._holds)
                self._tell()
        except BaseException as error:
            logger.exception("the engine has failed")
            self._fail(_failure(error))
        else:
            self._fail(PolicyServerError("the engine was closed"))

    def _run_commands(self) -> None:
        """Run what has come; waits for a command if there is nothing else to do."""
        while True:
            try:
                function, future = self._commands.get(block=not self._has_work() and not self._is_closing)
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                failure = _failure(error)
                future.set_exception(failure)
                raise failure from error
            future.set_result(result)
            self._tell()

    def _has_work(self) -> bool:
        if self._is_stopped():
            return False
        has_waiting = self._scheduler.num_waiting > 0 and not self._holds
        return self._scheduler.num_running > 0 or has_waiting

    def _is_stopped(self) -> bool:
        """Whether nothing may be drawn."""
        is_strict = any(mode != "wait" for mode in self._holds.values())
        return is_strict or (bool(self._holds) and self._scheduler.num_running == 0)

    def _tell(self) -> None:
        now = time.monotonic()
        only_ended = now - self._delivered_at < _DELIVERY_SECONDS and self._has_work()
        if not only_ended:
            self._delivered_at = now
        changed = self._scheduler.take_changed(only_ended)
        if changed:
            self._deliver([(sequence, sequence.error or sequence.take()) for sequence in changed])
        if self._quiet_waiters and self._is_stopped():
            waiters, self._quiet_waiters = self._quiet_waiters, []
            for _, waiter in waiters:
                waiter.set_result(None)

    def _fail(self, failure: PolicyServerError) -> None:
        with self._lock:
            self.failure = failure
        for _, waiter in self._quiet_waiters:
            waiter.set_exception(failure)
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                break
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
        self._deliver([])


def _failure(error: BaseException) -> PolicyServerError:
    if isinstance(error, PolicyServerError):
        return error
    failure = PolicyServerError(f"the engine has failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _chain(source: Future[None], target: Future[None]) -> None:
    """Hand a failure of `source` to `target`."""

    def copy(done: Future[None]) -> None:
        error = done.exception()
        if error is not None and not target.done():
            target.set_exception(error)

    source.add_done_callback(copy)
