"""The token-level route, the API key, health and metrics, over a real socket."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import httpx
import pytest

from contract.errors import ConfigError
from inference.server import bind
from tests.support.fake_engine import FakeEngine
from tests.unit.inference.serving import END_ID, error_of, folder_update, request, serve, until


def test_tokens_come_back_with_their_logprobs_versions_and_the_reason(tokenizer: Any) -> None:
    async def check() -> None:
        async with serve(FakeEngine(tokenizer)) as client:
            drawn = await client.generate("a", [9, 8, 7], max_tokens=4)
            assert drawn.request_id == "a" and drawn.tokens == [9, 8, 7, 9]
            assert drawn.logprobs == [-0.125, -0.25, -0.375, -0.5]
            assert drawn.versions == [0, 0, 0, 0] and drawn.finish_reason == "length"
            drawn = await client.generate("a", [9, 8, 7], stop_ids=[8])
            assert drawn.tokens == [9, 8] and drawn.finish_reason == "stop"

    asyncio.run(check())


def test_a_client_that_leaves_ends_its_request_in_the_engine(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            engine.step.clear()
            async with httpx.AsyncClient(base_url=client.url) as other:
                leaving = asyncio.create_task(client.post("/generate", request("leaves", [5])))
                staying = asyncio.create_task(other.post("/generate", content=_bytes("stays")))
                await until(lambda: engine.stats().num_running == 2, "both requests to run")
                leaving.cancel()
                await until(lambda: engine.stats().num_running == 1, "the request to end in the engine")
                engine.step.set()
                assert (await staying).status_code == 200
        assert "end leaves left" in engine.events and "end stays length" in engine.events

    asyncio.run(check())


def test_a_client_that_leaves_while_the_server_is_paused_never_reaches_the_engine(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            await client.post("/pause")
            with pytest.raises(httpx.ReadTimeout):
                await client.http.post("/generate", content=_bytes("a"), timeout=0.1)
            # Its id is free again, as nothing of it is left.
            again = asyncio.create_task(client.generate("a", [5], max_tokens=1))
            await asyncio.sleep(0.05)
            await client.post("/resume")
            await again
        assert engine.events.count("draw a") == 1

    asyncio.run(check())


def _bytes(name: str) -> bytes:
    from contract.policy import encode

    return encode(request(name, [5], max_tokens=2))


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e-320}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_sampling_out_of_range_is_refused(tokenizer: Any, sampling: dict[str, Any], word: str) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            response = await client.post("/generate", request("a", [5], **sampling))
            assert response.status_code == 400 and word in error_of(response)
        assert engine.events == []

    asyncio.run(check())


def test_what_cannot_be_served_is_refused_with_its_reason(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, max_len=8)
        async with serve(engine) as client:
            response = await client.post("/generate", request("a", [5] * 8))
            assert response.status_code == 400 and "8 tokens does not fit" in error_of(response)
            response = await client.post("/generate", request("a", []))
            assert response.status_code == 400
            response = await client.http.post("/generate", content=b"{}")
            assert response.status_code == 400 and "MessagePack" in error_of(response)
            nested = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
            response = await client.http.post("/generate", content=nested)
            assert response.status_code == 400 and "MessagePack" in error_of(response)
            assert (await client.http.get("/generate")).status_code == 405
            response = await client.http.get("/nothing")
            assert response.status_code == 404 and "/nothing" in error_of(response)

    asyncio.run(check())


def test_an_id_that_is_running_is_refused_and_the_running_request_goes_on(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            engine.step.clear()
            first = asyncio.create_task(client.generate("a", [5], max_tokens=2))
            await until(lambda: engine.stats().num_running == 1, "the first to run")
            response = await client.post("/generate", request("a", [6]))
            assert response.status_code == 409 and "'a'" in error_of(response)
            engine.step.set()
            assert (await first).tokens == [5, 5]
            assert (await client.generate("a", [6], max_tokens=1)).tokens == [6]

    asyncio.run(check())


def test_every_route_but_health_asks_for_the_key(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine, api_key="secret") as client:
            headers = [
                {},
                {"authorization": "Bearer secre"},
                {"authorization": "secret"},
                {"x-api-key": "secret"},
            ]
            posts = ["/generate", "/pause", "/resume", "/update_weights", "/v1/completions"]
            for header in headers:
                for path in posts:
                    assert (await client.http.post(path, headers=header)).status_code == 401, (path, header)
                for path in ("/version", "/metrics", "/v1/models"):
                    assert (await client.http.get(path, headers=header)).status_code == 401, (path, header)
            assert (await client.http.get("/health")).status_code == 200
            client.http.headers["authorization"] = "Bearer secret"
            assert (await client.generate("a", [5], max_tokens=1)).tokens == [5]
            assert (await client.http.get("/v1/models")).status_code == 200
        assert "pause keep" not in engine.events

    asyncio.run(check())


def test_health_tells_the_state_and_fails_with_the_engine(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine, run_id="12ab") as client:
            await client.generate("a", [5], max_tokens=3)
            health = (await client.http.get("/health")).json()
            assert health["status"] == "ok" and health["version"] == 0 and not health["paused"]
            assert health["progress"]["drawn_tokens"] == 3 and health["run_id"] == "12ab"
            await client.post("/pause")
            assert (await client.http.get("/health")).json()["paused"]
            await client.post("/resume")
            engine.failure = RuntimeError("out of memory")
            response = await client.http.get("/health")
            assert response.status_code == 503 and "out of memory" in response.json()["status"]

    asyncio.run(check())


def test_an_engine_that_draws_nothing_is_unhealthy_unless_it_is_paused(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine, stall_seconds=0.1) as client:
            engine.step.clear()
            drawing = asyncio.create_task(client.generate("a", [5], max_tokens=1))
            await until(lambda: engine.stats().num_running == 1, "the request to run")
            await client.http.get("/health")
            await asyncio.sleep(0.2)
            response = await client.http.get("/health")
            assert response.status_code == 503 and response.json()["status"].startswith("stalled")
            await client.post("/pause")
            assert (await client.http.get("/health")).status_code == 200
            await client.post("/resume")
            engine.step.set()
            await drawing
            assert (await client.http.get("/health")).status_code == 200

    asyncio.run(check())


def test_a_failed_engine_ends_what_waits_and_admits_nothing(tokenizer: Any) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer)
        async with serve(engine) as client:
            watching = asyncio.create_task(client.service.watch())
            await client.post("/pause")
            waiting = asyncio.create_task(client.post("/generate", request("a", [5])))
            polling = asyncio.create_task(client.http.get("/version?at_least=9&timeout_seconds=60"))
            await asyncio.sleep(0.05)
            engine.failure = RuntimeError("out of memory")
            assert await watching is engine.failure
            for response in (await waiting, await polling, await client.post("/generate", request("b", [5]))):
                assert response.status_code == 503 and "out of memory" in error_of(response)
            response = await client.post("/update_weights", folder_update(1))
            assert response.status_code == 503

    asyncio.run(check())


def test_metrics_count_requests_tokens_and_the_version(tokenizer: Any) -> None:
    async def check() -> None:
        async with serve(FakeEngine(tokenizer)) as client:
            await client.generate("a", [5, 6], max_tokens=3)
            await client.post("/generate", request("b", []))
            await client.post("/update_weights", folder_update(7))
            await client.http.get("/secret-path")
            text = (await client.http.get("/metrics")).text
        values = dict(re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE))
        expected = {
            "policy_prompt_tokens_total": 2,
            "policy_drawn_tokens_total": 3,
            "policy_updates_total": 1,
            "policy_version": 7,
            'policy_requests_total{route="/generate",status="200"}': 1,
            'policy_requests_total{route="/generate",status="400"}': 1,
            'policy_requests_total{route="other",status="404"}': 1,
            'policy_request_seconds_count{route="/generate"}': 2,
        }
        assert {name: float(values[name]) for name in expected} == expected
        assert "secret-path" not in text

    asyncio.run(check())


def test_a_port_that_is_taken_is_said_with_its_number() -> None:
    with bind("127.0.0.1", None) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port = {port}.*choose another port"):
            bind("127.0.0.1", port)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    bind("127.0.0.1", port).close()


def test_the_end_token_of_the_tests_is_that_of_the_tokenizer(tokenizer: Any) -> None:
    assert tokenizer.eos_token_id == END_ID
