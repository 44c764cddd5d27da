"""A policy server on a real socket, in the event loop of a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec
import openai

from contract.policy import (
    CONTENT_TYPE,
    NOBODY,
    FolderUpdate,
    GenerateRequest,
    GenerateResponse,
    Origin,
    Sampling,
    VersionInfo,
    WeightUpdate,
    encode,
)
from inference.engine.base import Engine
from inference.server import HttpServer, bind, build_app
from inference.service import PolicyService

MODEL = "tiny/model"
END_ID = 2
"""`<|im_end|>` of the tiny tokenizer."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Client:
    """Asks one server."""

    url: str
    http: httpx.AsyncClient
    service: PolicyService

    async def post(self, route: str, message: msgspec.Struct | None = None) -> httpx.Response:
        content = b"" if message is None else encode(message)
        return await self.http.post(route, content=content, headers={"content-type": CONTENT_TYPE})

    async def generate(self, name: str, prompt: list[int], **sampling: Any) -> GenerateResponse:
        response = await self.post("/generate", request(name, prompt, **sampling))
        assert response.status_code == 200, response.content
        return msgspec.msgpack.decode(response.content, type=GenerateResponse)

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)


def request(name: str, prompt: list[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt, Sampling(**sampling))


def folder_update(version: int, folder: str = "a,b", origin: Origin = NOBODY) -> FolderUpdate:
    """An update whose weights have the names in `folder`."""
    return FolderUpdate(version, folder, origin)


def served(response: httpx.Response) -> VersionInfo:
    """What a server says that draws now."""
    assert response.status_code == 200, response.content
    return msgspec.msgpack.decode(response.content, type=VersionInfo)


def error_of(response: httpx.Response) -> str:
    """The message of an `ErrorInfo`."""
    assert response.headers["content-type"] == CONTENT_TYPE
    return msgspec.msgpack.decode(response.content)["error"]


@contextmanager
def names_of_folder(update: WeightUpdate) -> Iterator[Iterator[tuple[str, Any]]]:
    """What `folder_update` announces."""
    assert isinstance(update, FolderUpdate)
    yield ((name, None) for name in update.folder.split(","))


@asynccontextmanager
async def serve(
    engine: Engine,
    *,
    api_key: str | None = None,
    open_update: Callable[[WeightUpdate], AbstractContextManager[Iterator[Any]]] = names_of_folder,
    **settings: Any,
) -> AsyncGenerator[Client, None]:
    """Serve `engine` for the time inside."""
    service = PolicyService(engine, open_update, **settings)
    app = build_app(service, served_name=MODEL, end_ids=frozenset({END_ID}), api_key=api_key)
    started = asyncio.Event()
    server = HttpServer(app, end_seconds=5, on_started=started.set)
    listener = bind("127.0.0.1", None)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(server.serve([listener]))
    await asyncio.wait_for(started.wait(), 10)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            yield Client(url, http, service)
    finally:
        service.close("the test is over")
        server.stop()
        await engine.close()
        await asyncio.wait_for(serving, 10)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition`, at most ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for: {what}"
        await asyncio.sleep(0.005)
