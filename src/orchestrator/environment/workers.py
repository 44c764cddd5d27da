"""The worker processes of one source, and the queue of calls before them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from contract.attempt import signal_name
from contract.errors import ConfigError, EnvironmentFailure, TailraceError
from orchestrator.config import SourceConfig
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.environment.process import WorkerProcess, start_worker
from orchestrator.environment.wire import encode_frame

# A worker is sent calls ahead of its answers, so that it need not wait for the event loop between two: as
# many as take about this long together.
_SECONDS_AHEAD = 0.02
_MAX_AHEAD = 32
# A call that runs for this long keeps others waiting: those behind it are given to other workers.
_STUCK_SECONDS = 0.25
_MEAN_WEIGHT = 0.2
_PAUSE_SECONDS = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Waits that are no setting of a source.

    Attributes:
        start_seconds: longest start of a worker, the import and constructor of the environment included.
        start_attempts: starts in a row that may fail, when a worker is replaced, before the source is given
            up. The first start of a source is tried once.
        queue_seconds: longest wait of a call for a free worker.
        close_seconds: how long a worker has to end by itself before it is killed.
    """

    start_seconds: float = 300.0
    start_attempts: int = 3
    queue_seconds: float = 1800.0
    close_seconds: float = 2.0


@dataclass(slots=True)
class Counters:
    """What has happened to one source.

    Attributes:
        calls: answered or failed.
        failures: calls without a result, by kind (`environment`, `timeout`, `worker`).
        workers_replaced: workers that ended or were killed, and after which another was started.
        seconds: spent in the environment's code, over all workers, by calls that were answered.
    """

    calls: int = 0
    failures: dict[str, int] = field(default_factory=lambda: {"environment": 0, "timeout": 0, "worker": 0})
    workers_replaced: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    function: str
    frame: bytes
    future: asyncio.Future[Any]
    since: float


@dataclass(slots=True, eq=False)
class _Place:
    """A place for a worker: its process now, and what that has been sent and not answered."""

    described: asyncio.Future[dict[str, Any]]
    worker: WorkerProcess | None = None
    announced: asyncio.Future[list[Any]] | None = None
    ready: bool = False
    in_flight: deque[_Call] = field(default_factory=deque)
    recalled: set[int] = field(default_factory=set)
    """Numbers of calls in flight that other workers have been given; their answers here do not count."""
    head_since: float = 0.0
    stuck: bool = False
    blamed: _Call | None = None
    timer: asyncio.TimerHandle | None = None
    mean_seconds: float | None = None

    @property
    def room(self) -> int:
        """How many calls more the worker may be sent."""
        if not self.ready or self.blamed is not None or (self.stuck and self.in_flight):
            return 0
        ahead = 1 if self.mean_seconds is None else int(_SECONDS_AHEAD / max(self.mean_seconds, 1e-9))
        return max(1, min(_MAX_AHEAD, ahead)) - len(self.in_flight)


class WorkerPool:
    """Workers of one source. Belongs to one event loop; `start` comes first, `close` last."""

    def __init__(self, config: SourceConfig, limits: Limits) -> None:
        self.counters = Counters()
        self._config = config
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Call] = deque()
        self._queue_timer: asyncio.TimerHandle | None = None
        self._numbers = itertools.count()
        self._places = [_Place(self._loop.create_future()) for _ in range(config.num_workers)]
        self._keepers: list[asyncio.Task[None]] = []
        self._failed: TailraceError | None = None
        self._closed = False

    @property
    def worker_pids(self) -> list[int]:
        """The processes that serve calls now."""
        return [place.worker.pid for place in self._places if place.ready and place.worker is not None]

    async def start(self) -> dict[str, Any]:
        """Start the workers; returns `num_tasks`, `max_turns` and `tools`.

        Raises:
            ConfigError: the environment does not exist, or does not take its settings.
            EnvironmentFailure: its module or its constructor fails, or two workers differ.
        """
        self._keepers = [self._loop.create_task(self._keep(place)) for place in self._places]
        found = await asyncio.gather(*(place.described for place in self._places), return_exceptions=True)
        for description in found:
            if isinstance(description, BaseException):
                raise description
            if description != found[0]:
                raise EnvironmentFailure(
                    f"source {self._config.title!r}: two workers differ in num_tasks, max_turns or tools, so "
                    f"the constructor of {self._config.environment} gives other tasks each time: "
                    f"{found[0]!r:.200} and {description!r:.200}"
                )
        assert isinstance(found[0], dict)
        return found[0]

    async def call(self, function: str, *arguments: Any) -> Any:
        """Have a worker run `function`; returns what it returned, as JSON values.

        Raises:
            EpisodeFailed: `environment`, `timeout` or `worker`.
            EnvironmentFailure: the workers cannot be started any more.
        """
        if self._failed is not None:
            raise type(self._failed)(str(self._failed))
        if self._closed:
            raise RuntimeError(f"source {self._config.title!r} is closed")
        number = next(self._numbers)
        frame = encode_frame((number, function, arguments))
        call = _Call(number, function, frame, self._loop.create_future(), self._loop.time())
        self._queue.append(call)
        self._hand_out()
        return await call.future

    async def close(self) -> None:
        """End the workers; calls without an answer are cancelled. A second call does nothing."""
        self._closed = True
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        for call in [*self._queue, *(call for place in self._places for call in place.in_flight)]:
            call.future.cancel()
        self._queue.clear()
        for timer in [self._queue_timer, *(place.timer for place in self._places)]:
            if timer is not None:
                timer.cancel()
        closing = []
        for place in self._places:
            if place.worker is not None:
                # One that is at a call, or still being constructed, would not notice that it was asked.
                idle = place.ready and not place.in_flight
                closing.append(place.worker.close(self._limits.close_seconds if idle else 0.0))
            place.ready, place.worker = False, None
            place.described.cancel()
        await asyncio.gather(*closing)

    async def _keep(self, place: _Place) -> None:
        """Hold one place: start a worker, and after its end another."""
        attempts = 0
        try:
            while True:
                try:
                    description, ended = await self._start_worker(place)
                except TailraceError as error:
                    attempts += 1
                    if not place.described.done() or attempts >= self._limits.start_attempts:
                        self._give_up(error)
                        return
                    logger.warning("A worker could not be replaced and is tried again: %s", error)
                    await asyncio.sleep(_PAUSE_SECONDS * 2**attempts)
                    continue
                attempts = 0
                if not place.described.done():
                    place.described.set_result(description)
                place.ready = True
                self._hand_out()
                code = await ended
                self._take_leave(place, code)
        except Exception as error:  # A defect here must reach those who wait for calls.
            logger.exception("The workers of %r are given up", self._config.title)
            self._give_up(EnvironmentFailure(f"source {self._config.title!r}: {error!r}"))

    async def _start_worker(self, place: _Place) -> tuple[dict[str, Any], asyncio.Task[int]]:
        """Start a worker and wait until it is ready; returns its description, and what waits for its end."""
        config = self._config
        name = f"source {config.title!r} ({config.environment})"
        try:
            request = encode_frame(
                {"source": config.title, "environment": config.environment, "settings": config.settings}
            )
        except TypeError as error:
            raise ConfigError(f"{name}: settings must be values that JSON can hold: {error}") from error
        worker = place.worker = await start_worker(partial(self._receive, place))
        announced = place.announced = self._loop.create_future()
        ended = self._loop.create_task(worker.ended())
        worker.send_frame(request)
        seconds = self._limits.start_seconds
        await asyncio.wait({announced, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if announced.done():
            status, value = announced.result()
            if status == "ready":
                return value, ended
            error = ConfigError(value) if status == "config" else EnvironmentFailure(value)
        elif ended.done():
            end = _describe_end(ended.result())
            error = EnvironmentFailure(
                f"{name}: its worker process {end} before the environment was ready; what it printed is in "
                f"the orchestrator's log"
            )
        else:
            error = EnvironmentFailure(
                f"{name}: importing and constructing it took longer than {seconds:g} s, and was ended"
            )
        worker.kill()
        await ended
        raise error

    def _receive(self, place: _Place, worker: WorkerProcess, message: list[Any]) -> None:
        """An answer of the worker, or the news that it is ready."""
        if worker is not place.worker:
            return
        if isinstance(message[0], str):
            if place.announced is not None and not place.announced.done():
                place.announced.set_result(message)
            return
        number, failure, result, seconds = message
        if not place.in_flight or place.in_flight[0].number != number:
            # A worker answers in the order in which it is asked: the environment has found the socket.
            worker.kill()
            return
        call = place.in_flight.popleft()
        place.head_since, place.stuck = self._loop.time(), False
        mean = place.mean_seconds
        place.mean_seconds = seconds if mean is None else mean + _MEAN_WEIGHT * (seconds - mean)
        self.counters.seconds += seconds
        if number in place.recalled:
            place.recalled.discard(number)
        elif failure is not None:
            self._fail(call, "environment", f"{call.function}: {failure}")
        else:
            self.counters.calls += 1
            if not call.future.done():
                call.future.set_result(result)
        if self._queue:
            self._hand_out()

    def _hand_out(self) -> None:
        """Send calls to workers that have room, the oldest first, to the least busy."""
        while self._queue:
            if self._queue[0].future.done():  # Its caller has given up.
                self._queue.popleft()
                continue
            place = max(self._places, key=_rank)
            if place.room <= 0:
                break
            assert place.worker is not None
            call = self._queue.popleft()
            if not place.in_flight:
                place.head_since, place.stuck = self._loop.time(), False
            place.in_flight.append(call)
            self._watch(place)
            place.worker.send_frame(call.frame)
        if self._queue and self._queue_timer is None:
            deadline = self._queue[0].since + self._limits.queue_seconds
            self._queue_timer = self._loop.call_at(deadline, self._check_queue)

    def _watch(self, place: _Place) -> None:
        # One timer for each worker, moved only when it fires: calls may be far more often than that.
        if place.timer is None and place.in_flight:
            seconds = self._config.timeout_seconds
            if not place.stuck:
                seconds = min(seconds, _STUCK_SECONDS)
            place.timer = self._loop.call_at(place.head_since + seconds, self._check, place)

    def _check(self, place: _Place) -> None:
        """Look at how long the call that a worker is at has run."""
        place.timer = None
        if not place.in_flight or place.blamed is not None:
            return
        seconds = self._loop.time() - place.head_since
        if seconds >= self._config.timeout_seconds:
            assert place.worker is not None
            place.blamed = place.in_flight[0]
            place.worker.kill()
            return
        if seconds >= _STUCK_SECONDS and not place.stuck:
            place.stuck = True
            if len(self._places) > 1:
                self._recall(place, list(place.in_flight)[1:])
        self._watch(place)

    def _recall(self, place: _Place, calls: list[_Call]) -> None:
        """Put calls that a worker has not come to back at the head of the queue."""
        waiting = [call for call in calls if call.number not in place.recalled]
        place.recalled.update(call.number for call in waiting)
        self._queue.extendleft(reversed(waiting))
        self._hand_out()

    def _check_queue(self) -> None:
        """Fail the calls that have waited too long for a worker."""
        self._queue_timer = None
        seconds = self._limits.queue_seconds
        while self._queue and self._queue[0].since + seconds <= self._loop.time():
            self._fail(
                self._queue.popleft(),
                "timeout",
                f"waited {seconds:g} s for a free worker of source {self._config.title!r} (num_workers = "
                f"{self._config.num_workers}); raise sources.num_workers",
            )
        self._hand_out()

    def _take_leave(self, place: _Place, code: int) -> None:
        """A worker has ended: fail the call that it was at, and put the others back into the queue."""
        place.ready = False
        blamed, calls = place.blamed, list(place.in_flight)
        if calls and blamed in (None, calls[0]):
            head = calls.pop(0)
            if head.number not in place.recalled:
                self._fail(head, *self._cause(head, code, killed=blamed is not None))
        elif not calls:
            logger.warning("A worker of source %r %s", self._config.title, _describe_end(code))
        place.in_flight.clear()
        place.blamed = place.mean_seconds = place.worker = None
        self._recall(place, calls)
        place.recalled.clear()
        self.counters.workers_replaced += 1

    def _cause(self, call: _Call, code: int, *, killed: bool) -> tuple[str, str]:
        title, seconds = self._config.title, self._config.timeout_seconds
        if killed:
            kind, text = "timeout", f"{call.function} of source {title!r} took longer than {seconds:g} s"
        else:
            kind, text = "worker", f"the worker of source {title!r} {_describe_end(code)} in {call.function}"
        logger.warning("%s; the worker is replaced", text)
        return kind, text

    def _fail(self, call: _Call, kind: str, message: str) -> None:
        self.counters.calls += 1
        self.counters.failures[kind] += 1
        if not call.future.done():
            call.future.set_exception(EpisodeFailed(kind, message))

    def _give_up(self, error: TailraceError) -> None:
        """The source cannot go on: everything that waits for it gets `error`."""
        if self._failed is None:
            self._failed = error
        waiting = [*self._queue, *(call for place in self._places for call in place.in_flight)]
        self._queue.clear()
        for future in [*(call.future for call in waiting), *(place.described for place in self._places)]:
            if not future.done():
                future.set_exception(type(error)(str(error)))


def _rank(place: _Place) -> tuple[bool, int]:
    return place.room > 0, -len(place.in_flight)


def _describe_end(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal_name(-code)}"
