"""Work that ends when its client goes away, at the level of ASGI messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from inference.disconnect import ClientGone, EventStream, until_disconnect


class Peer:
    """A client that takes `num_messages` and leaves when it is asked for more."""

    def __init__(self, num_messages: int) -> None:
        self.sent: list[Any] = []
        self._num_messages = num_messages
        self._leaves = asyncio.Event()

    async def receive(self) -> Any:
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.sent) == self._num_messages:
            self._leaves.set()
            await asyncio.Event().wait()
        self.sent.append(message)


@pytest.mark.parametrize("num_messages", [0, 1, 2])
def test_a_stream_closes_its_source_wherever_the_client_leaves(num_messages: int) -> None:
    closed: list[str] = []

    async def count() -> AsyncGenerator[int, None]:
        try:
            for number in range(5):
                yield number
        finally:
            await asyncio.sleep(0)
            closed.append("source")

    async def check() -> None:
        source = count()
        assert await anext(source) == 0

        async def events() -> AsyncGenerator[bytes, None]:
            async for number in source:
                yield b"%d" % number

        peer = Peer(num_messages)
        await EventStream(events(), source)({}, peer.receive, peer.send)
        assert closed == ["source"] and len(peer.sent) == num_messages

    asyncio.run(check())


def test_work_has_cleaned_up_before_the_client_is_reported_gone() -> None:
    async def check() -> None:
        done: list[str] = []
        leaves = asyncio.Event()

        async def work() -> None:
            try:
                leaves.set()
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                done.append("clean")

        async def receive() -> Any:
            await leaves.wait()
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGone):
            await until_disconnect(receive, work())
        assert done == ["clean"]

    asyncio.run(check())


def test_an_error_of_the_work_is_that_of_the_caller() -> None:
    async def work() -> None:
        raise KeyError("x")

    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(KeyError):
        asyncio.run(until_disconnect(receive, work()))
