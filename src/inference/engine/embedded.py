"""The embedded engine: a transformers model in this process, drawn from by a thread of its own.

Owns the requests as the event loop sees them; what is computed, and when, belongs to `worker` and
`scheduler`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from contract.errors import PolicyServerError
from contract.policy import GenerateRequest, PauseMode
from inference.engine.base import Drawn, EngineStats, NamedTensors
from inference.engine.model import SlotModel
from inference.engine.scheduler import Scheduler
from inference.engine.sequence import Sequence, check_request
from inference.engine.weights import stage
from inference.engine.worker import Delivery, Worker

T = TypeVar("T")

_CLOSE_SECONDS = 120.0
_USER = "user"
_UPDATE = "update"


class EmbeddedEngine:
    """See `base.Engine` for the contract; all methods belong to one event loop.

    Attributes:
        tokenizer: of the model.
        end_ids: tokens at which the model was made to end. The engine ends at those that a request names, and
            at no others.
    """

    def __init__(
        self,
        model: SlotModel,
        tokenizer: Any,
        *,
        max_len: int,
        end_ids: tuple[int, ...] = (),
        version: int = 0,
    ) -> None:
        """
        Args:
            version: of the model as loaded.
        """
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self._model = model
        self._max_len = max_len
        self._scheduler = Scheduler(model, max_len, version)
        self._worker = Worker(self._scheduler, self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inboxes: dict[Sequence, asyncio.Queue[Drawn | Exception]] = {}
        self._update_lock = asyncio.Lock()
        self._worker.call(model.use_device)
        self._worker.start()

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        return self._scheduler.version

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt included, in tokens."""
        return self._max_len

    @property
    def is_paused(self) -> bool:
        """Whether a pause is in force, that of a weight update included."""
        return self._worker.is_paused

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine for good; None while it works."""
        return self._worker.failure

    @property
    def device(self) -> torch.device:
        """On which it computes."""
        return self._model.device

    def draw(self, request: GenerateRequest) -> AsyncGenerator[Drawn, None]:
        """See `base.Engine.draw`. What is wrong with the request is said at once; it is drawn from the first
        iteration on.
        """
        if self._worker.failure is not None:
            raise self._worker.failure
        check_request(request, vocab_size=self._model.vocab_size, max_len=self._max_len)
        return self._draw(Sequence(request, self.tokenizer))

    async def _draw(self, sequence: Sequence) -> AsyncGenerator[Drawn, None]:
        self._loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Drawn | Exception] = asyncio.Queue()
        self._inboxes[sequence] = inbox
        is_ended = False
        try:
            if self._worker.failure is not None:
                raise self._worker.failure
            self._worker.submit(sequence)
            while not is_ended:
                item = await inbox.get()
                if isinstance(item, Exception):
                    is_ended = True
                    raise item
                is_ended = item.finish_reason is not None
                yield item
        finally:
            del self._inboxes[sequence]
            if not is_ended:
                self._worker.cancel(sequence)

    async def pause(self, mode: PauseMode) -> None:
        """See `base.Engine.pause`.

        Raises:
            PolicyServerError: the engine has failed, or was resumed before the pause had begun.
        """
        await _result(self._worker.hold(_USER, mode))

    async def resume(self) -> None:
        """Go on."""
        await _result(self._worker.release(_USER))

    async def load(self, tensors: NamedTensors, version: int, mode: PauseMode) -> None:
        """See `base.Engine.load`. One after another; a pause of the user, begun before or meanwhile, stays.

        Raises:
            PublishError: see there.
            PolicyServerError: the engine has failed.
        """
        async with self._update_lock:
            staged = await asyncio.to_thread(stage, self._model.lm, tensors)
            try:
                await _result(self._worker.hold(_UPDATE, mode))
                await _result(self._worker.call(lambda: self._scheduler.update(staged.copy_into, version)))
            finally:
                await _result(self._worker.release(_UPDATE))

    def stats(self) -> EngineStats:
        """For metrics."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_drawn_tokens=scheduler.num_drawn_tokens,
            num_prefills=scheduler.num_prefills,
            num_updates=scheduler.num_updates,
        )

    async def close(self) -> None:
        """End running and waiting requests (`abort`) and the thread. Safe to call again."""
        await asyncio.to_thread(self._worker.close, _CLOSE_SECONDS)

    def _deliver(self, delivery: Delivery) -> None:
        """In the worker's thread."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._sort, delivery)
        except RuntimeError:
            # The loop was closed: there is nobody left to tell.
            if not loop.is_closed():
                raise

    def _sort(self, delivery: Delivery) -> None:
        for sequence, item in delivery:
            inbox = self._inboxes.get(sequence)
            if inbox is not None:
                inbox.put_nowait(item)
        failure = self._worker.failure
        if failure is not None:
            # Behind what was delivered: who has got a finish reason does not look any further.
            for inbox in self._inboxes.values():
                inbox.put_nowait(PolicyServerError(str(failure)))


async def _result(future: Future[T]) -> T:
    # Shielded: what was asked of the worker is done, whoever still waits for it. A pause that is never taken
    # back because its caller was cancelled would stop the engine for good.
    return await asyncio.shield(asyncio.wrap_future(future))
