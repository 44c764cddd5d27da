"""Pauses, updates and versions: what order the engine sees, and what clients are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from contract.policy import PauseRequest, WeightUpdate
from tests.support.fake_engine import FakeEngine
from tests.unit.inference.serving import error_of, folder_update, request, serve, served, until


def _version(response: httpx.Response) -> int:
    return served(response).version


def test_no_request_reaches_the_engine_between_pause_and_resume(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            await client.generate("before", [5], max_tokens=1)
            await client.post("/pause", PauseRequest("wait"))
            held = [
                asyncio.create_task(client.generate(f"held-{index}", [5], max_tokens=1)) for index in range(3)
            ]
            await asyncio.sleep(0.05)
            assert _version(await client.post("/update_weights", folder_update(1))) == 1
            await asyncio.sleep(0.05)
            await client.post("/resume")
            assert [(await task).versions for task in held] == [[1]] * 3
        order = [event for event in engine.events if not event.startswith(("end", "read"))]
        assert order[:4] == ["draw before", "pause wait", "swap", "resume"]
        assert sorted(order[4:]) == ["draw held-0", "draw held-1", "draw held-2"]

    asyncio.run(check())


def test_running_requests_are_kept_finished_or_aborted_as_the_pause_says(tokenizer: Any) -> None:
    async def check(mode: Any, reason: str, num_tokens: int) -> None:
        engine = FakeEngine(tokenizer)
        engine.hold_after = 3
        async with serve(engine) as client:
            drawing = asyncio.create_task(client.generate("a", [5], max_tokens=20))
            await until(lambda: not engine.step.is_set(), "three tokens")
            pausing = asyncio.create_task(client.post("/pause", PauseRequest(mode)))
            await until(lambda: f"pause {mode}" in engine.events, "the pause")
            engine.step.set()
            assert (await pausing).status_code == 200
            assert engine.stats().num_running == (1 if mode == "keep" else 0)
            await asyncio.sleep(0.02)
            assert engine.stats().num_drawn_tokens == (20 if mode == "wait" else 3)
            await client.post("/resume")
            drawn = await drawing
        assert (drawn.finish_reason, len(drawn.tokens)) == (reason, num_tokens)

    asyncio.run(check("keep", "length", 20))
    asyncio.run(check("wait", "length", 20))
    asyncio.run(check("abort", "abort", 3))


def test_an_update_answers_when_the_new_version_draws(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            engine.hold_load.clear()
            updating = asyncio.create_task(client.post("/update_weights", folder_update(4)))
            await until(lambda: "read b" in engine.events, "the weights to be read")
            # While weights are read, drawing goes on with the old ones.
            assert (await client.generate("a", [5], max_tokens=2)).versions == [0, 0]
            assert (await client.http.get("/health")).json()["updating"] == 4
            assert not updating.done()
            engine.hold_load.set()
            assert _version(await updating) == 4
            assert (await client.generate("b", [5], max_tokens=2)).versions == [4, 4]
            assert (await client.http.get("/health")).json()["updating"] is None

    asyncio.run(check())


def test_a_second_update_at_a_time_is_refused(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            engine.hold_load.clear()
            first = asyncio.create_task(client.post("/update_weights", folder_update(1)))
            await until(lambda: "read b" in engine.events, "the first to be read")
            second = await client.post("/update_weights", folder_update(2))
            assert second.status_code == 409 and "version 1 is being loaded" in error_of(second)
            engine.hold_load.set()
            assert _version(await first) == 1
            assert _version(await client.post("/update_weights", folder_update(2))) == 2

    asyncio.run(check())


def test_the_present_version_may_be_loaded_again_and_an_older_one_may_not(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            assert _version(await client.post("/update_weights", folder_update(5))) == 5
            assert _version(await client.post("/update_weights", folder_update(5))) == 5
            refused = await client.post("/update_weights", folder_update(4))
            assert refused.status_code == 409 and "older than version 5" in error_of(refused)
        assert engine.events.count("swap") == 2 and engine.version == 5

    asyncio.run(check())


def test_a_failed_update_leaves_the_old_version_and_closes_what_it_opened(tokenizer: Any) -> None:
    opened: list[str] = []

    @contextmanager
    def open_update(update: WeightUpdate) -> Iterator[Iterator[tuple[str, Any]]]:
        opened.append(f"open in {threading.current_thread() is threading.main_thread()}")
        try:
            yield ((name, None) for name in ("a", "unknown", "b"))
        finally:
            opened.append("close")

    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine, open_update=open_update) as client:
            refused = await client.post("/update_weights", folder_update(1))
            assert refused.status_code == 422 and "'unknown' is no weight" in error_of(refused)
            assert opened == ["open in False", "close"]
            assert (await client.generate("a", [5], max_tokens=1)).versions == [0]
            assert _version(await client.http.get("/version")) == 0
            assert (await client.http.get("/health")).status_code == 200
        assert "swap" not in engine.events

    asyncio.run(check())


def test_an_update_that_cannot_be_opened_is_an_error_and_not_the_end(tokenizer: Any) -> None:
    @contextmanager
    def open_update(update: WeightUpdate) -> Iterator[Iterator[tuple[str, Any]]]:
        raise OSError("no such folder")
        yield iter(())

    async def check() -> None:
        async with serve(FakeEngine(tokenizer), open_update=open_update) as client:
            for _ in range(2):
                response = await client.post("/update_weights", folder_update(1))
                assert response.status_code == 500 and "no such folder" in error_of(response)
            assert (await client.generate("a", [5], max_tokens=1)).versions == [0]

    asyncio.run(check())


def test_a_long_poll_answers_when_the_version_comes_or_the_time_is_over(tokenizer: Any) -> None:
    async def check() -> None:
        async with serve(FakeEngine(tokenizer)) as client:
            assert _version(await client.http.get("/version")) == 0
            assert _version(await client.http.get("/version?at_least=1&timeout_seconds=0.05")) == 0
            polls = [
                asyncio.create_task(client.http.get(f"/version?at_least={wanted}&timeout_seconds=60"))
                for wanted in (1, 2, 3)
            ]
            await asyncio.sleep(0.05)
            await client.post("/update_weights", folder_update(2))
            assert [_version(await poll) for poll in polls[:2]] == [2, 2]
            await asyncio.sleep(0.02)
            assert not polls[2].done()
            await client.post("/update_weights", folder_update(3))
            assert _version(await polls[2]) == 3
            for query in ("at_least=x", "timeout_seconds=x", "timeout_seconds=-1", "timeout_seconds=1e9"):
                assert (await client.http.get(f"/version?{query}")).status_code == 400, query

    asyncio.run(check())


def test_a_pause_that_fails_does_not_shut_the_gate(tokenizer: Any) -> None:
    class Stubborn(FakeEngine):
        async def pause(self, mode: Any) -> None:
            raise RuntimeError("no pause today")

    async def check() -> None:
        async with serve(Stubborn(tokenizer)) as client:
            response = await client.post("/pause")
            assert response.status_code == 500 and "no pause today" in error_of(response)
            assert (await client.generate("a", [5], max_tokens=1)).tokens == [5]
            assert (await client.post("/generate", request("b", [5], max_tokens=1))).status_code == 200

    asyncio.run(check())
