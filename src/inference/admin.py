"""Routes of whoever runs the policy: its version, pauses, new weights, health, metrics.

Bodies are MessagePack, of the types of `contract.policy`; health is JSON and metrics are Prometheus' text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from contract.policy import (
    CONTENT_TYPE,
    HEALTH_ROUTE,
    PAUSE_ROUTE,
    RESUME_ROUTE,
    UPDATE_ROUTE,
    VERSION_ROUTE,
    PauseRequest,
    WeightUpdate,
    encode,
)
from inference.disconnect import until_disconnect
from inference.metrics import Metrics
from inference.refusal import Refused
from inference.service import PolicyService

METRICS_ROUTE = "/metrics"

T = TypeVar("T")


def pack(message: msgspec.Struct) -> Response:
    """An answer in MessagePack."""
    return Response(encode(message), media_type=CONTENT_TYPE)


def unpack(body: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """
    Raises:
        Refused: the body is not what the route takes.
    """
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not the MessagePack that this route takes: {error}") from error


class Admin:
    """The handlers, over one service."""

    def __init__(self, service: PolicyService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._pause = msgspec.msgpack.Decoder(PauseRequest)
        self._update: msgspec.msgpack.Decoder[WeightUpdate] = msgspec.msgpack.Decoder(WeightUpdate)

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(VERSION_ROUTE, self.version, methods=["GET"]),
            Route(PAUSE_ROUTE, self.pause, methods=["POST"]),
            Route(RESUME_ROUTE, self.resume, methods=["POST"]),
            Route(UPDATE_ROUTE, self.update, methods=["POST"]),
            Route(HEALTH_ROUTE, self.health, methods=["GET"]),
            Route(METRICS_ROUTE, self.metrics, methods=["GET"]),
        ]

    async def version(self, request: Request) -> Response:
        """What draws; waits up to `timeout_seconds` for a version of `at_least`, or of another trainer."""
        at_least = _parameter(request, "at_least", int)
        timeout_seconds = _parameter(request, "timeout_seconds", float)
        waiting = self._service.wait_for_version(at_least, timeout_seconds)
        return pack(await until_disconnect(request.receive, waiting))

    async def pause(self, request: Request) -> Response:
        """Returns when nothing is being drawn; an empty body is mode `keep`."""
        body = await request.body()
        await self._service.pause(unpack(body, self._pause).mode if body else "keep")
        return pack(self._service.weights)

    async def resume(self, request: Request) -> Response:
        """Go on."""
        await self._service.resume()
        return pack(self._service.weights)

    async def update(self, request: Request) -> Response:
        """Load weights. Goes on if the client leaves: half an update would be worse than one unasked for."""
        update = unpack(await request.body(), self._update)
        return pack(await self._service.update(update))

    async def health(self, request: Request) -> Response:
        """200 if the server can be relied on, 503 if it has failed, stalls or ends."""
        is_well, state = self._service.health()
        return JSONResponse(state, 200 if is_well else 503)

    async def metrics(self, request: Request) -> Response:
        """In Prometheus' text format."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _parameter(request: Request, name: str, kind: Callable[[str], T]) -> T:
    text = request.query_params.get(name, "0")
    try:
        return kind(text)
    except ValueError:
        raise Refused(400, f"{name} = {text!r} is not a number") from None
