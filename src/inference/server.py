"""The policy server as an ASGI application, and the socket that it listens on.

Puts the routes together: token level (here), `inference.admin`, and those of OpenAI
(`inference.openai_api`). What they do is in `inference.service`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from contract.errors import ConfigError
from contract.policy import GENERATE_ROUTE, GenerateRequest, GenerateResponse
from inference.admin import Admin, pack, unpack
from inference.auth import ApiKey
from inference.disconnect import ClientGone, until_disconnect
from inference.metrics import Metrics
from inference.openai_api.routes import OpenAIRoutes
from inference.refusal import Refused, answer_refusal
from inference.service import PolicyService

# The client's pool closes idle connections first: a server that does it may close one that a request is just
# being sent on.
_KEEP_ALIVE_SECONDS = 600
_BACKLOG = 2048


def build_app(
    service: PolicyService, *, served_name: str, end_ids: frozenset[int], api_key: str | None = None
) -> ASGIApp:
    """The application.

    Args:
        served_name: model name of the OpenAI routes.
        end_ids: tokens that end what OpenAI's clients ask for.
        api_key: key that every request but that of health must bring; None asks for none.
    """
    openai = OpenAIRoutes(service, served_name, end_ids)
    generate = Route(GENERATE_ROUTE, _Generate(service).answer, methods=["POST"])
    metrics = Metrics(service)
    routes = [generate, *Admin(service, metrics).routes(), *openai.routes()]
    metrics.know(route.path for route in routes)
    app = Starlette(
        routes=routes,
        exception_handlers={
            Refused: _on_refused,
            HTTPException: _on_http_error,
            ClientGone: _on_client_gone,
            ClientDisconnect: _on_client_gone,
            Exception: _on_defect,
        },
    )
    return metrics.middleware(ApiKey(app, api_key))


class _Generate:
    """The token-level route."""

    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._decoder = msgspec.msgpack.Decoder(GenerateRequest)

    async def answer(self, request: Request) -> Response:
        wanted = unpack(await request.body(), self._decoder)
        return pack(await until_disconnect(request.receive, self._draw(wanted)))

    async def _draw(self, wanted: GenerateRequest) -> GenerateResponse:
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish_reason = None
        async with contextlib.aclosing(self._service.draw(wanted)) as pieces:
            async for piece in pieces:
                tokens += piece.tokens
                logprobs += piece.logprobs
                versions += piece.versions
                finish_reason = piece.finish_reason
        assert finish_reason is not None, "the engine ended a request without a reason"
        return GenerateResponse(wanted.request_id, tokens, logprobs, versions, finish_reason)


def bind(host: str, port: int | None) -> socket.socket:
    """A socket bound to the address; it listens once it is served.

    Raises:
        ConfigError: the address is in use, or none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    # A server that starts again must not wait for the connections of the one before it.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port or 0))
    except OSError as error:
        bound.close()
        raise address_error(host, port, error) from error
    return bound


def address_error(host: str, port: int | None, error: OSError) -> ConfigError:
    """For an address that cannot be bound or listened on."""
    return ConfigError(
        f"the policy server cannot bind host = {host!r}, port = {port}: {error.strerror or error}; choose "
        f"another port (None takes a free one), or end what listens there"
    )


class HttpServer(uvicorn.Server):
    """Serves one application on one bound socket until it is told to stop. Signals are the caller's."""

    def __init__(self, app: ASGIApp, *, end_seconds: int, on_started: Callable[[], None]) -> None:
        """
        Args:
            end_seconds: longest wait for running requests once it is told to stop.
            on_started: called once, when requests are accepted.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=end_seconds,
            )
        )
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def stop(self) -> None:
        """Accept nothing more, and return from `serve` when running requests have ended."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return answer_refusal(request.url.path, error)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    return answer_refusal(request.url.path, Refused(error.status_code, f"{where}: {error.detail}"))


def _on_client_gone(request: Request, error: Exception) -> Response:
    # Nobody reads it; the status is for the metrics.
    return Response(status_code=499)


def _on_defect(request: Request, error: Exception) -> Response:
    # The application raises the error again after this answer, and uvicorn logs it with its traceback.
    message = f"{request.method} {request.url.path}: {type(error).__name__}: {error}"
    return answer_refusal(request.url.path, Refused(500, message))
