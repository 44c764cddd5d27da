"""The choices of one OpenAI request, drawn side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from contract.policy import FinishReason, GenerateRequest
from inference.engine.base import Drawn
from inference.openai_api.text import TextStream
from inference.service import PolicyService


@dataclass(frozen=True, slots=True)
class Part:
    """What came to a choice: text that is certain now, and the tokens drawn since the last part.

    Attributes:
        offsets: where the text of each token begins, in characters of the choice.
        finish_reason: None while more will come.
    """

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    offsets: Sequence[int]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Choice:
    """One sequence on its way."""

    index: int
    request: GenerateRequest
    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def push(self, piece: Drawn) -> Part:
        """Take what was drawn."""
        text = self.stream.push(piece.tokens, piece.finish_reason)
        offsets = self.stream.offsets[len(self.tokens) :]
        self.text += text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason
        return Part(self.index, text, piece.tokens, piece.logprobs, offsets, piece.finish_reason)

    def whole(self) -> Part:
        """Everything so far as one part."""
        offsets = self.stream.offsets
        return Part(self.index, self.text, self.tokens, self.logprobs, offsets, self.finish_reason)


async def draw_choices(service: PolicyService, choices: Sequence[Choice]) -> AsyncGenerator[Part, None]:
    """The parts of all choices as they come, until all are finished. Closing it ends them.

    Raises:
        Refused: one of them is refused or fails; the others are ended.
    """
    parts: asyncio.Queue[Part | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_draw(service, choice, parts)) for choice in choices]
    num_left = len(tasks)
    try:
        while num_left:
            part = await parts.get()
            if isinstance(part, BaseException):
                raise part
            if part is None:
                num_left -= 1
            else:
                yield part
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _draw(
    service: PolicyService, choice: Choice, parts: asyncio.Queue[Part | BaseException | None]
) -> None:
    """Put the parts of one choice, and None or an error as the last."""
    try:
        async with aclosing(service.draw(choice.request)) as pieces:
            async for piece in pieces:
                parts.put_nowait(choice.push(piece))
    except Exception as error:
        parts.put_nowait(error)
    else:
        parts.put_nowait(None)
