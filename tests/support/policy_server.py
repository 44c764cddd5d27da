"""A policy server that answers by script: no model, the routes of `contract.policy`, much faster than one.

In tests it runs in their event loop (`async with PolicyServer(...)`); for benchmarks
`python -m tests.support.policy_server` runs one in a process of its own. One asyncio protocol for each
connection; the requests of a connection are answered in order, as HTTP asks.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import parse_qs

import msgspec

from contract import policy
from contract.policy import (
    NOBODY,
    BroadcastUpdate,
    ErrorInfo,
    FolderUpdate,
    GenerateRequest,
    GenerateResponse,
    Origin,
    PauseRequest,
    VersionInfo,
    WeightUpdate,
)


@dataclass(frozen=True)
class Reply:
    """What the script says to one request.

    Attributes:
        logprobs, versions: None is -0.5 for each token, and the server's version.
        delay_seconds: before the answer.
        status: 400 and more answers `ErrorInfo(error)`.
        drop: close the connection in place of an answer.
        body: sent in place of a response.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    versions: list[int] | None = None
    finish_reason: policy.FinishReason = "stop"
    delay_seconds: float = 0.0
    status: int = 200
    error: str = ""
    drop: bool = False
    body: bytes | None = None


Script = Callable[[GenerateRequest], Reply]


def in_turn(*replies: Reply) -> Script:
    """One reply after the other; the last one for ever."""
    waiting = deque(replies)

    def answer(_request: GenerateRequest) -> Reply:
        return waiting.popleft() if len(waiting) > 1 else waiting[0]

    return answer


class PolicyServer:
    """Attributes:
    version, origin: drawn with; `set_version` changes the version, and an accepted update both.
    requests: draws asked for, in order (the last `keep` of them).
    calls: routes asked for, in order, with the body of admin calls (the last `keep` of them).
    num_aborted: draws whose connection was closed before their answer.
    num_running, most_running: draws not answered yet, and the most there were at a time.
    refusals: answers to coming updates, as (status, text); without any, updates are accepted.
    """

    def __init__(
        self,
        script: Script,
        *,
        version: int = 0,
        origin: Origin = NOBODY,
        api_key: str | None = None,
        port: int = 0,
        keep: int = 10_000,
    ) -> None:
        self.version = version
        self.origin = origin
        self.requests: deque[GenerateRequest] = deque(maxlen=keep)
        self.calls: deque[tuple[str, object]] = deque(maxlen=keep)
        self.refusals: deque[tuple[int, str]] = deque()
        self.num_aborted = 0
        self.num_running = 0
        self.most_running = 0
        self._script = script
        self._expected = None if api_key is None else f"bearer {api_key}".lower()
        self._port = port
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and drops all connections; `start` may follow, at the same port."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.drop()
        await self._server.wait_closed()

    async def __aenter__(self) -> PolicyServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def set_version(self, version: int) -> None:
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def answer(self, route: str, query: str, headers: bytes, body: bytes) -> tuple[int, bytes] | None:
        """Status and body; None drops the connection."""
        if route == policy.HEALTH_ROUTE:
            return 200, b""
        if self._expected is not None and self._expected.encode() not in headers.lower():
            return 401, policy.encode(ErrorInfo("the key is not right"))
        if route == policy.GENERATE_ROUTE:
            return await self._generate(body)
        if route == policy.VERSION_ROUTE:
            self.calls.append((route, query))
            return 200, policy.encode(VersionInfo(await self._await_version(query), self.origin))
        if route == policy.UPDATE_ROUTE:
            return await self._update(policy.decode(body, WeightUpdate))  # pyright: ignore[reportArgumentType]
        if route in (policy.PAUSE_ROUTE, policy.RESUME_ROUTE):
            self.calls.append((route, policy.decode(body, PauseRequest) if body else None))
            return 200, policy.encode(VersionInfo(self.version, self.origin))
        return 404, policy.encode(ErrorInfo(f"no route {route}"))

    async def _generate(self, body: bytes) -> tuple[int, bytes] | None:
        request = policy.decode(body, GenerateRequest)
        self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            reply = self._script(request)
            if reply.delay_seconds:
                await asyncio.sleep(reply.delay_seconds)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
        if reply.drop:
            return None
        if reply.status >= 400:
            return reply.status, policy.encode(ErrorInfo(reply.error))
        if reply.body is not None:
            return reply.status, reply.body
        num_tokens = len(reply.tokens)
        logprobs = [-0.5] * num_tokens if reply.logprobs is None else reply.logprobs
        versions = [self.version] * num_tokens if reply.versions is None else reply.versions
        response = GenerateResponse(request.request_id, reply.tokens, logprobs, versions, reply.finish_reason)
        return 200, policy.encode(response)

    async def _await_version(self, query: str) -> int:
        wanted = {name: float(values[0]) for name, values in parse_qs(query).items()}
        try:
            async with asyncio.timeout(wanted.get("timeout_seconds", 0.0)), self._changed:
                await self._changed.wait_for(lambda: self.version >= wanted.get("at_least", 0))
        except TimeoutError:
            pass
        return self.version

    async def _update(self, update: FolderUpdate | BroadcastUpdate) -> tuple[int, bytes]:
        self.calls.append((policy.UPDATE_ROUTE, update))
        if self.refusals:
            status, text = self.refusals.popleft()
            return status, policy.encode(ErrorInfo(text))
        self.origin = update.origin
        await self.set_version(update.version)
        return 200, policy.encode(VersionInfo(self.version, self.origin))


class _Connection(asyncio.Protocol):
    """Reads requests as they come, and answers one after the other."""

    def __init__(self, server: PolicyServer) -> None:
        self._policy = server
        self._received = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._policy._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._policy._connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._task is None:
            self._serve_next()

    def _serve_next(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end])
        length = _content_length(head)
        if len(self._received) < end + 4 + length:
            return
        body = bytes(self._received[end + 4 : end + 4 + length])
        del self._received[: end + 4 + length]
        target = head.split(b" ", 2)[1].decode()
        route, _, query = target.partition("?")
        self._task = asyncio.get_running_loop().create_task(self._serve(route, query, head, body))

    async def _serve(self, route: str, query: str, head: bytes, body: bytes) -> None:
        try:
            answer = await self._policy.answer(route, query, head, body)
        except msgspec.DecodeError as error:
            answer = 400, policy.encode(ErrorInfo(str(error)))
        assert self._transport is not None
        self._task = None
        if answer is None:
            self._transport.abort()
            return
        status, content = answer
        head_line = f"HTTP/1.1 {status} -\r\nContent-Type: {policy.CONTENT_TYPE}\r\n"
        self._transport.write(f"{head_line}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        self._serve_next()


def _content_length(head: bytes) -> int:
    lowered = head.lower()
    start = lowered.find(b"\r\ncontent-length:")
    if start < 0:
        return 0
    return int(lowered[start + 17 :].split(b"\r\n", 1)[0])


async def _serve_for_ever(arguments: argparse.Namespace) -> None:
    tokens = [int(token) for token in arguments.tokens.split(",")]
    reply = Reply(tokens, delay_seconds=arguments.delay_seconds)
    async with PolicyServer(lambda _request: reply, port=arguments.port, keep=1) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Answers every draw with the same tokens, and prints its address."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 is a free one")
    parser.add_argument("--tokens", default="5,6,7,2", help="of every answer")
    parser.add_argument("--delay-seconds", type=float, default=0.0, help="before every answer")
    asyncio.run(_serve_for_ever(parser.parse_args()))


if __name__ == "__main__":
    main()
