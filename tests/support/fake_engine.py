"""An engine without a model: it draws what a script says, one token at a time, and notes what it is asked.

It keeps the contract of `inference.engine.base.Engine` in the simplest way: one coroutine per request, on
the caller's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from contract.errors import PolicyServerError, PublishError
from contract.policy import GenerateRequest, PauseMode
from inference.engine.base import Drawn, EngineStats, NamedTensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Script = Callable[[GenerateRequest], Sequence[int]]
"""What a request draws; without end tokens it goes on to `max_tokens`, over and over."""


def echo(request: GenerateRequest) -> Sequence[int]:
    """The prompt again."""
    return request.prompt


class FakeEngine:
    """Draws `script(request)`; token i has log-probability -(i + 1) / 8.

    Attributes:
        events: what happened, in order: `draw ID`, `end ID REASON`, `pause MODE`, `resume`, `read NAME`,
            `swap`.
        step: set when tokens may be drawn; cleared, everything stands still (but pauses).
        hold_after: once so many tokens are drawn in all, `step` is cleared; None never does.
        hold_load: what a load waits for after it has read the weights.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, script: Script = echo, *, max_len: int = 512
    ) -> None:
        self.tokenizer = tokenizer
        self.failure: BaseException | None = None
        self.version = 0
        self.max_len = max_len
        self.events: list[str] = []
        self.step = asyncio.Event()
        self.step.set()
        self.hold_after: int | None = None
        self.hold_load = asyncio.Event()
        self.hold_load.set()
        self.is_closed = False
        self._script = script
        self._going_on = asyncio.Event()
        self._going_on.set()
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._counts = {"prompt": 0, "drawn": 0, "prefills": 0, "updates": 0}

    @property
    def is_paused(self) -> bool:
        return not self._going_on.is_set()

    async def draw(self, request: GenerateRequest) -> AsyncGenerator[Drawn, None]:
        if self.failure is not None:
            raise PolicyServerError("the engine has failed")
        if not 0 < len(request.prompt) < self.max_len:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens does not fit max_len {self.max_len}")
        name, reason = request.request_id, "left"
        self.events.append(f"draw {name}")
        self._counts["prompt"] += len(request.prompt)
        self._counts["prefills"] += 1
        self._running.add(name)
        try:
            async for drawn in self._pieces(request):
                reason = drawn.finish_reason or reason
                yield drawn
        finally:
            self._running.discard(name)
            self._aborted.discard(name)
            self.events.append(f"end {name} {reason}")

    async def _pieces(self, request: GenerateRequest) -> AsyncGenerator[Drawn, None]:
        script = self._script(request)
        room = min(request.sampling.max_tokens, self.max_len - len(request.prompt))
        drawn: list[int] = []
        while True:
            await asyncio.sleep(0)
            await self._turn(request.request_id)
            if request.request_id in self._aborted:
                yield Drawn((), (), (), "abort")
                return
            index = len(drawn)
            drawn.append(script[index % len(script)])
            self._counts["drawn"] += 1
            if self._counts["drawn"] == self.hold_after:
                self.step.clear()
            reason = "length" if len(drawn) == room else None
            if len(drawn) >= request.sampling.min_tokens and self._ends(request, drawn):
                reason = "stop"
            yield Drawn((drawn[-1],), (-(index + 1) / 8,), (self.version,), reason)
            if reason is not None:
                return

    async def _turn(self, name: str) -> None:
        """Until a token may be drawn."""
        while not (self._going_on.is_set() and self.step.is_set()):
            if self.failure is not None:
                raise PolicyServerError(f"the engine has failed: {self.failure}")
            if name in self._aborted:
                return
            await asyncio.sleep(0.002)

    def _ends(self, request: GenerateRequest, drawn: list[int]) -> bool:
        if drawn[-1] in request.sampling.stop_ids:
            return True
        if not request.sampling.stop:
            return False
        text, before = str(self.tokenizer.decode(drawn)), str(self.tokenizer.decode(drawn[:-1]))
        return any(text.count(stop) > before.count(stop) for stop in request.sampling.stop)

    async def pause(self, mode: PauseMode) -> None:
        self.events.append(f"pause {mode}")
        if mode == "abort":
            self._aborted |= self._running
        while mode != "keep" and self._running:
            await asyncio.sleep(0.002)
        self._going_on.clear()

    async def resume(self) -> None:
        self.events.append("resume")
        self._going_on.set()

    async def load(self, tensors: NamedTensors, version: int, mode: PauseMode) -> None:
        def read() -> None:
            for name, _ in tensors:
                self.events.append(f"read {name}")
                if name == "unknown":
                    raise PublishError("'unknown' is no weight of this model")

        was_paused = self.is_paused
        await asyncio.to_thread(read)
        await self.hold_load.wait()
        if not was_paused:
            await self.pause(mode)
        self.events.append("swap")
        self.version = version
        self._counts["updates"] += 1
        if not was_paused:
            await self.resume()

    def stats(self) -> EngineStats:
        counts = self._counts
        return EngineStats(
            len(self._running), 0, counts["prompt"], counts["drawn"], counts["prefills"], counts["updates"]
        )

    async def close(self) -> None:
        self.is_closed = True
        self._aborted |= self._running
        while self._running and self.failure is None:
            await asyncio.sleep(0.002)
