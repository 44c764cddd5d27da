"""Handlers of OpenAI's routes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from contract.errors import TailraceError
from contract.policy import GenerateRequest
from inference.disconnect import EventStream, until_disconnect
from inference.openai_api.bodies import Body, ChatBody, CompletionBody, parse
from inference.openai_api.choices import Choice, Part, draw_choices
from inference.openai_api.prompts import tokens_of_chat, tokens_of_prompts
from inference.openai_api.replies import ChatReply, CompletionReply, Reply
from inference.openai_api.text import TextStream
from inference.refusal import Refused, openai_error
from inference.service import PolicyService

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in /v1/completions. A chat without a limit may fill the context."""


class OpenAIRoutes:
    """The handlers, over one service."""

    def __init__(self, service: PolicyService, served_name: str, end_ids: frozenset[int]) -> None:
        """
        Args:
            end_ids: tokens that end an answer.
        """
        self._service = service
        self._name = served_name
        self._end_ids = end_ids
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The same by its name."""
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> ASGIApp:
        """Texts or token ids, continued."""
        body = parse(await request.body(), CompletionBody)
        self._check_model(body.model)
        tokenizer = self._service.engine.tokenizer
        prompts = tokens_of_prompts(tokenizer, body.prompt)
        max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        reply = CompletionReply(tokenizer, self._name, body)
        return await self._answer(request, body, reply, prompts, max_tokens)

    async def chat(self, request: Request) -> ASGIApp:
        """The next message of a conversation."""
        body = parse(await request.body(), ChatBody)
        self._check_model(body.model)
        tokenizer = self._service.engine.tokenizer
        prompt = tokens_of_chat(tokenizer, body)
        # A prompt that leaves no room is the engine's to refuse.
        room = max(1, self._service.engine.max_len - len(prompt), body.min_tokens)
        reply = ChatReply(tokenizer, self._name, body)
        return await self._answer(request, body, reply, [prompt], room if body.limit is None else body.limit)

    async def _answer(
        self, request: Request, body: Body, reply: Reply, prompts: Sequence[list[int]], max_tokens: int
    ) -> ASGIApp:
        choices = [
            self._choice(reply, body, prompt, max_tokens, index=place * body.n + number, number=number)
            for place, prompt in enumerate(prompts)
            for number in range(body.n)
        ]
        parts = draw_choices(self._service, choices)
        if not body.stream:
            await until_disconnect(request.receive, _exhaust(parts))
            return JSONResponse(reply.whole(choices))
        # The status comes before the first event: wait until it is known that nothing is refused.
        first = await until_disconnect(request.receive, _next(parts))
        return EventStream(_events(reply, choices, first, parts), parts)

    def _choice(
        self, reply: Reply, body: Body, prompt: list[int], max_tokens: int, *, index: int, number: int
    ) -> Choice:
        sampling = body.sampling(max_tokens, self._end_ids, number)
        stream = TextStream(self._service.engine.tokenizer, prompt, sampling.stop, sampling.stop_ids)
        return Choice(index, GenerateRequest(f"{reply.id}-{index}", prompt, sampling), stream)

    def _model(self) -> dict[str, object]:
        engine = self._service.engine
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "tailrace",
            "max_model_len": engine.max_len,
            "version": self._service.weights.version,
        }

    def _check_model(self, name: str) -> None:
        if name != self._name:
            message = f"the model {name!r} does not exist; this server serves {self._name!r}"
            raise Refused(404, message, param="model", code="model_not_found")


async def _exhaust(parts: AsyncGenerator[Part, None]) -> None:
    """Until all are drawn: the choices keep them."""
    async for _ in parts:
        pass


async def _next(parts: AsyncGenerator[Part, None]) -> Part:
    return await anext(parts)


async def _events(
    reply: Reply, choices: Sequence[Choice], first: Part, parts: AsyncGenerator[Part, None]
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. An error that comes now is an event, since the status is sent."""
    for event in reply.begin(choices):
        yield _event(event)
    part: Part | None = first
    try:
        while part is not None:
            event = reply.event(part, choices[part.index])
            if event is not None:
                yield _event(event)
            part = await anext(parts, None)
    except TailraceError as error:
        refusal = error if isinstance(error, Refused) else Refused(500, str(error))
        yield _event(openai_error(refusal))
        return
    for event in reply.end(choices):
        yield _event(event)
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
