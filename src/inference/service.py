"""What the policy server does, apart from HTTP: who may draw when, one update at a time, how it ends.

Owns the gate of admission, the names of running requests, the order of updates and who waits for a version.
Leaves drawing, pausing and swapping weights to the engine.

Invariants: between `pause` and `resume` no request reaches the engine, it waits here; one update at a time;
a request that names a run has no token of weights of another (`inference.lineage` knows whose they are);
after `close` or a failure of the engine nothing waits any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from contract.errors import PolicyServerError, PublishError
from contract.policy import (
    GenerateRequest,
    InvalidSampling,
    PauseMode,
    VersionInfo,
    WeightUpdate,
    check_sampling,
)
from inference.engine.base import Drawn, Engine
from inference.lineage import Lineage
from inference.refusal import Refused

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

OpenUpdate = Callable[[WeightUpdate], AbstractContextManager[Iterator[tuple[str, "torch.Tensor"]]]]
"""Opens announced weights; blocking, and so is the iterator."""

_WATCH_SECONDS = 0.2
_LONGEST_WAIT_SECONDS = 3600.0


class PolicyService:
    """One engine and everybody who asks something of it. All methods run on one event loop."""

    def __init__(
        self,
        engine: Engine,
        open_update: OpenUpdate,
        *,
        pause_mode: PauseMode = "keep",
        stall_seconds: float = 300.0,
        run_id: str = "",
    ) -> None:
        """
        Args:
            pause_mode: what becomes of running requests during an update.
            stall_seconds: an engine that has requests, is not paused and draws nothing for so long is not
                healthy.
            run_id: run that the server belongs to, of which alone it takes weights; empty is none. Health
                tells it.
        """
        self.engine = engine
        self._open_update = open_update
        self._pause_mode: PauseMode = pause_mode
        self._stall_seconds = stall_seconds
        self._run_id = run_id
        self._lineage = Lineage(engine.version, run_id)
        self._gate = asyncio.Event()
        self._gate.set()
        self._pausing = asyncio.Lock()
        self._running: set[str] = set()
        self._num_held = 0
        self._updating: int | None = None
        self._version_changed = asyncio.Event()
        self._ending: str | None = None
        self._progress = (0, 0, 0)
        self._progress_at = time.monotonic()

    @property
    def weights(self) -> VersionInfo:
        """Those that draw now."""
        info = self._lineage.info(self.engine.version)
        return msgspec.structs.replace(info, max_len=self.engine.max_len)

    @property
    def is_updating(self) -> bool:
        """Whether weights are being loaded."""
        return self._updating is not None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the end of a pause, or for a place in the engine."""
        return self._num_held + self.engine.stats().num_waiting

    async def draw(self, request: GenerateRequest) -> AsyncGenerator[Drawn, None]:
        """Draw one sequence; waits while the server is paused. Closing the generator ends the request.

        Raises:
            Refused: the prompt or the sampling cannot be served (400), the id is in use (409), the weights
                are not of the run that the request names, or no longer (`OTHER_RUN`), the server ends or its
                engine has failed (503).
        """
        try:
            check_sampling(request.sampling)
        except InvalidSampling as error:
            raise Refused(400, str(error), param=error.field) from error
        if request.request_id in self._running:
            raise Refused(409, f"request_id {request.request_id!r} is running already; ids must be unique")
        self._running.add(request.request_id)
        try:
            await self._admission()
            # At once, not with the first token, which may be long in coming.
            self._lineage.versions([self.engine.version], request.run_id)
            async with aclosing(self.engine.draw(request)) as pieces:
                async for piece in pieces:
                    versions = self._lineage.versions(piece.versions, request.run_id)
                    yield replace(piece, versions=versions)
        except ValueError as error:
            raise Refused(400, str(error), code="invalid_prompt") from error
        except Refused:
            raise
        except PolicyServerError as error:
            raise Refused(503, str(error)) from error
        finally:
            self._running.discard(request.request_id)

    async def pause(self, mode: PauseMode) -> None:
        """Admit and draw nothing until `resume`; returns when nothing is being drawn."""
        async with self._pausing:
            self._check_alive()
            self._gate.clear()
            try:
                await self.engine.pause(mode)
            except BaseException:
                # Nobody will resume what could not be paused.
                self._gate.set()
                raise

    async def resume(self) -> None:
        """Go on; nothing happens if the server is not paused."""
        async with self._pausing:
            self._check_alive()
            await self.engine.resume()
            self._gate.set()

    async def update(self, update: WeightUpdate) -> VersionInfo:
        """Load weights; returns when the next token will be drawn with them.

        Returns:
            What draws now.

        Raises:
            Refused: another update is going on, or `Lineage.admit` refuses this one (409), the weights cannot
                be loaded (422): the server stays on the version that it had. 503 as above.
        """
        self._check_alive()
        if self._updating is not None:
            raise Refused(
                409, f"version {update.version} must wait: version {self._updating} is being loaded"
            )
        number = self._lineage.admit(update, self.engine.version)
        self._updating = update.version
        began = time.monotonic()
        try:
            await self._load(update, number)
        except PublishError as error:
            raise Refused(422, f"version {update.version} was not loaded: {error}") from error
        except PolicyServerError as error:
            raise Refused(503, f"version {update.version} was not loaded: {error}") from error
        finally:
            self._updating = None
            self._lineage.settle(self.engine.version)
        logger.debug("version %d loaded in %.2f s", update.version, time.monotonic() - began)
        self._tell_waiters()
        return self.weights

    async def wait_for_version(self, at_least: int, timeout_seconds: float) -> VersionInfo:
        """What draws, as soon as its version is `at_least` or its trainer is new, or after the time."""
        if not 0 <= timeout_seconds <= _LONGEST_WAIT_SECONDS:
            raise Refused(
                400, f"timeout_seconds = {timeout_seconds:g} is not between 0 and {_LONGEST_WAIT_SECONDS:g}"
            )
        origin = self.weights.origin
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.weights.version < at_least and self.weights.origin == origin:
                    self._check_alive()
                    await self._version_changed.wait()
        except TimeoutError:
            pass
        return self.weights

    async def watch(self, on_look: Callable[[], None] = lambda: None) -> BaseException:
        """Wait until the engine fails, and return why. Meanwhile keeps an eye on its progress.

        Args:
            on_look: called several times a second.
        """
        while (failure := self.engine.failure) is None:
            self._note_progress()
            on_look()
            await asyncio.sleep(_WATCH_SECONDS)
        self.close(describe(failure))
        return failure

    def close(self, reason: str) -> None:
        """From now on nothing is admitted, and whatever waits here is refused with `reason`."""
        if self._ending is None:
            self._ending = reason
        self._gate.set()
        self._tell_waiters()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the server can be relied on, and how it is."""
        self._note_progress()
        stats, failure = self.engine.stats(), self.engine.failure
        idle = time.monotonic() - self._progress_at
        if failure is not None:
            status = f"failed: {describe(failure)}"
        elif self._ending is not None:
            status = f"ending: {self._ending}"
        elif idle > self._stall_seconds:
            status = f"stalled: {stats.num_running} running requests, nothing drawn for {idle:.0f} s"
        else:
            status = "ok"
        return status == "ok", {
            "status": status,
            "run_id": self._run_id,
            "version": self.weights.version,
            "weights_of_run": self.weights.origin.run_id,
            "paused": self.engine.is_paused,
            "updating": self._updating,
            "running": stats.num_running,
            "waiting": self.num_waiting,
            "progress": {
                "prompt_tokens": stats.num_prompt_tokens,
                "drawn_tokens": stats.num_drawn_tokens,
                "updates": stats.num_updates,
                "seconds_without": round(idle, 3),
            },
        }

    async def _admission(self) -> None:
        self._num_held += 1
        try:
            await self._gate.wait()
        finally:
            self._num_held -= 1
        self._check_alive()

    async def _load(self, update: WeightUpdate, number: int) -> None:
        tensors = _read(self._open_update, update)
        try:
            await self.engine.load(tensors, number, self._pause_mode)
        except Exception:
            # Whatever is open may block when it is closed.
            await asyncio.to_thread(tensors.close)
            raise
        await asyncio.to_thread(tensors.close)

    def _note_progress(self) -> None:
        stats = self.engine.stats()
        progress = (stats.num_prompt_tokens, stats.num_drawn_tokens, stats.num_updates)
        has_work = stats.num_running > 0 and not self.engine.is_paused
        if progress != self._progress or not has_work:
            self._progress, self._progress_at = progress, time.monotonic()

    def _check_alive(self) -> None:
        if self._ending is not None:
            raise Refused(503, f"the policy server takes no requests any more: {self._ending}")

    def _tell_waiters(self) -> None:
        self._version_changed.set()
        self._version_changed = asyncio.Event()


def describe(failure: BaseException) -> str:
    """Why the engine ended."""
    known = isinstance(failure, PolicyServerError)
    return str(failure) if known else f"the engine has failed: {type(failure).__name__}: {failure}"


def _read(open_update: OpenUpdate, update: WeightUpdate) -> Generator[tuple[str, torch.Tensor], None, None]:
    """The weights, opened where the engine reads them: in a thread of its own."""
    with open_update(update) as tensors:
        yield from tensors
