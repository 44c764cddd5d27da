"""One server, several runs and attempts: what draws are told that name a run whose weights are replaced."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec

from contract.policy import GenerateRequest, GenerateResponse, Origin, Sampling
from tests.support.fake_engine import FakeEngine
from tests.unit.inference.serving import Client, error_of, folder_update, serve, served, until

FIRST, OTHER, AGAIN = Origin("a", "t1"), Origin("b", "t2"), Origin("a", "t3")


def _info(response: httpx.Response) -> tuple[int, Origin]:
    info = served(response)
    assert info.max_len == 512, "that of the engine"
    return info.version, info.origin


async def _update(client: Client, version: int, origin: Origin) -> None:
    response = await client.post("/update_weights", folder_update(version, origin=origin))
    assert response.status_code == 200, response.content
    assert _info(response) == (version, origin)


async def _draw(client: Client, name: str, run_id: str, max_tokens: int = 2) -> httpx.Response:
    request = GenerateRequest(name, [5], Sampling(max_tokens=max_tokens), run_id)
    return await client.post("/generate", request)


def _versions(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.content
    return msgspec.msgpack.decode(response.content, type=GenerateResponse).versions


def test_a_server_goes_from_run_to_run_and_back_to_an_earlier_version(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            refused = await _draw(client, "early", "a")
            assert refused.status_code == 412 and "those of no run, not of run a" in error_of(refused)
            assert engine.events == [], "it is refused before a token is drawn"
            for origin, versions in ((FIRST, (0, 1, 2, 3)), (OTHER, (0, 1)), (AGAIN, (2, 3))):
                for version in versions:
                    await _update(client, version, origin)
                    found = await client.http.get("/version")
                    assert _info(found) == (version, origin)
                    health = (await client.http.get("/health")).json()
                    assert (health["version"], health["weights_of_run"]) == (version, origin.run_id)
                    assert f"policy_version {version}.0" in (await client.http.get("/metrics")).text
                    assert _versions(await _draw(client, "own", origin.run_id)) == [version] * 2
                    assert _versions(await _draw(client, "any", "")) == [version] * 2
                    stranger = "b" if origin.run_id == "a" else "a"
                    assert (await _draw(client, "stranger", stranger)).status_code == 412

    asyncio.run(check())


def test_what_is_being_drawn_for_a_run_ends_when_the_weights_of_another_come(tokenizer: Any) -> None:
    async def check(run_id: str) -> httpx.Response:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            await _update(client, 4, FIRST)
            engine.hold_after = 3
            begun = asyncio.create_task(_draw(client, "begun", run_id, 8))
            await until(lambda: not engine.step.is_set(), "three tokens")
            about_to_begin = asyncio.create_task(_draw(client, "about to begin", "a", 8))
            await until(lambda: engine.stats().num_running == 2, "the second request to reach the engine")
            await _update(client, 0, OTHER)
            engine.step.set()
            assert (await about_to_begin).status_code == 412
            answer = await begun
            assert engine.stats().num_running == 0
            return answer

    refused = asyncio.run(check("a"))
    assert refused.status_code == 412 and "those of run b, not of run a" in error_of(refused)
    assert _versions(asyncio.run(check(""))) == [4, 4, 4, 0, 0, 0, 0, 0]


def test_what_is_being_drawn_goes_on_when_the_trainer_of_its_run_was_started_again(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            await _update(client, 4, FIRST)
            engine.hold_after = 3
            drawing = asyncio.create_task(_draw(client, "one", "a", 8))
            await until(lambda: not engine.step.is_set(), "three tokens")
            await _update(client, 4, AGAIN)
            engine.step.set()
            assert _versions(await drawing) == [4] * 8

    asyncio.run(check())


def test_a_request_that_waited_for_the_end_of_a_pause_is_looked_at_after_it(tokenizer: Any) -> None:
    async def check() -> None:
        async with serve(FakeEngine(tokenizer)) as client:
            await _update(client, 1, FIRST)
            await client.post("/pause")
            held = asyncio.create_task(_draw(client, "held", "a"))
            await until(lambda: client.service.num_waiting == 1, "the request to wait")
            await _update(client, 0, OTHER)
            await client.post("/resume")
            assert (await held).status_code == 412

    asyncio.run(check())


def test_a_run_whose_weights_cannot_be_loaded_takes_the_server_from_nobody(tokenizer: Any) -> None:
    async def check() -> None:
        async with serve(FakeEngine(tokenizer)) as client:
            await _update(client, 4, FIRST)
            failed = await client.post("/update_weights", folder_update(0, "a,unknown", OTHER))
            assert failed.status_code == 422
            assert _versions(await _draw(client, "own", "a")) == [4, 4]
            await _update(client, 5, FIRST)
            assert _versions(await _draw(client, "own", "a")) == [5, 5]

    asyncio.run(check())


def test_a_server_of_one_run_refuses_another(tokenizer: Any) -> None:
    async def check() -> None:
        async with serve(FakeEngine(tokenizer), run_id="a") as client:
            await _update(client, 0, FIRST)
            refused = await client.post("/update_weights", folder_update(0, origin=OTHER))
            assert refused.status_code == 409 and "this server belongs to run a" in error_of(refused)
            await _update(client, 1, FIRST)

    asyncio.run(check())


def test_a_long_poll_answers_at_once_when_another_trainer_has_come(tokenizer: Any) -> None:
    async def check() -> None:
        async with serve(FakeEngine(tokenizer)) as client:
            await _update(client, 4, FIRST)
            poll = asyncio.create_task(client.http.get("/version?at_least=5&timeout_seconds=60"))
            await asyncio.sleep(0.05)
            assert not poll.done()
            await _update(client, 0, OTHER)
            found = await asyncio.wait_for(poll, 10)
            assert _info(found) == (0, OTHER)

    asyncio.run(check())
