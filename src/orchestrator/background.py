"""Work beside the main loop, whose failures reach it; waits with a limit; and how late the event loop is.

Nothing that runs in the background may fail unseen: the first error of any task is raised in the main loop
the next time it looks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from contract.errors import TailraceError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LAG_INTERVAL = 0.25
_LAG_WARNING = 1.0
_LAG_QUIET = 60.0


class Background:
    """The tasks of one pipeline. `changed` is set whenever one of them has done something worth a look."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._error: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work`; its error is raised by `raise_if_failed`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def raise_if_failed(self) -> None:
        """Raises the first error of any task."""
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Cancel what still runs, and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
        self.changed.set()


async def run_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, in order; an error, or being cancelled, ends all of them first."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.gather(*unfinished, return_exceptions=True)


@asynccontextmanager
async def time_limit(seconds: float, what: str, kind: type[TailraceError]) -> AsyncIterator[None]:
    """Raises `kind`, saying `what` was waited for, if the body takes longer."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise kind(f"{what} took longer than {seconds:g} s") from error


class LoopLag:
    """Measures how late the event loop is: whatever holds it up stops every episode."""

    def __init__(self, on_beat: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            on_beat: called several times a second, as long as the loop turns.
        """
        self._on_beat = on_beat
        self._max_lag = 0.0
        self._quiet_until = 0.0

    def take(self) -> float:
        """The greatest lag since the last call, in seconds."""
        lag, self._max_lag = self._max_lag, 0.0
        return lag

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            begin = time.monotonic()
            self._on_beat()
            await asyncio.sleep(_LAG_INTERVAL)
            now = time.monotonic()
            lag = now - begin - _LAG_INTERVAL
            self._max_lag = max(self._max_lag, lag)
            if lag > _LAG_WARNING and now >= self._quiet_until:
                self._quiet_until = now + _LAG_QUIET
                logger.warning(
                    "the orchestrator's event loop stood still for %.1f s: the machine is overloaded, or "
                    "code that belongs in a worker process runs in it",
                    lag,
                )
