"""The client against a scripted server over HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from contract.errors import PolicyServerError
from contract.policy import GenerateRequest, GenerateResponse, Origin, Sampling, VersionInfo
from contract.policy import encode as encode_message
from contract.sections import SamplingConfig
from orchestrator.client import PolicyClient
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.episode import EpisodeRunner
from orchestrator.tokens import TurnRenderer
from tests.support.policy_server import PolicyServer, Reply, in_turn
from tests.unit.orchestrator.chats import ScriptedSource, byte_tokenizer, encode, tool, user

T = TypeVar("T")
OK = Reply([5, 6], [-0.1, -0.2], [3, 4])
SLOW = Reply([5], delay_seconds=60)
BROKEN = Reply(status=503, error="loading")
SAMPLING = Sampling(temperature=0.5, max_tokens=8, stop_ids=[2], seed=2**63 - 1)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(limited())


async def until(condition: Any) -> None:
    """Returns once `condition()` holds; the limit is that of the test."""
    while not condition():
        await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_draw_carries_prompt_and_sampling_there_and_tokens_back() -> None:
    async def work() -> None:
        async with PolicyServer(in_turn(OK), api_key="secret") as server:
            async with PolicyClient([server.url + "/"], api_key="secret") as client:
                answer = await client.generate([1, 2, 3], SAMPLING, "r1")
            assert (answer.tokens, answer.logprobs, answer.versions) == ([5, 6], [-0.1, -0.2], [3, 4])
            assert list(server.requests) == [GenerateRequest("r1", [1, 2, 3], SAMPLING)]
            assert client.num_retries == 0

    run(work())


@pytest.mark.parametrize("fault", [BROKEN, Reply(drop=True), Reply(status=500, error="boom")])
def test_a_server_that_fails_for_a_while_is_asked_again(fault: Reply) -> None:
    async def work() -> None:
        async with (
            PolicyServer(in_turn(fault, fault, OK)) as server,
            PolicyClient([server.url], server_patience_seconds=20) as client,
        ):
            assert (await client.generate([1], SAMPLING, "r")).tokens == [5, 6]
            ids = [request.request_id for request in server.requests]
            assert len(set(ids)) == 3 and client.num_retries == 2

    run(work())


def test_a_server_that_comes_back_at_its_address_is_used_again() -> None:
    async def work() -> None:
        server = PolicyServer(in_turn(OK))
        async with server:
            url = server.url
        async with PolicyClient([url], server_patience_seconds=20) as client:
            draws = [asyncio.create_task(client.generate([1], SAMPLING, f"r{n}")) for n in range(20)]
            polls = asyncio.create_task(client.wait_for_version(0, 0))
            await until(lambda: client.num_retries >= 20)
            async with server:
                assert all(answer.tokens == [5, 6] for answer in await asyncio.gather(*draws))
                assert await polls == 0
                assert (await client.generate([1], SAMPLING, "later")).tokens == [5, 6]

    run(work())


@pytest.mark.parametrize("ask", ["draw", "version"])
def test_a_server_out_of_reach_for_too_long_is_named_with_its_last_error(ask: str) -> None:
    async def work() -> None:
        port = free_port()
        async with PolicyClient([f"http://127.0.0.1:{port}"], server_patience_seconds=0.3) as client:
            with pytest.raises(PolicyServerError) as error:
                await (
                    client.generate([1], SAMPLING, "r") if ask == "draw" else client.wait_for_version(0, 0)
                )
            assert client.num_retries >= 2
        assert f"http://127.0.0.1:{port} has been out of reach" in str(error.value)
        assert "server_patience_seconds = 0.3" in str(error.value)
        assert "Connect call failed" in str(error.value)

    run(work())


def test_a_request_that_alone_is_not_answered_fails_its_episode_and_not_the_run() -> None:
    async def work() -> None:
        def script(request: GenerateRequest) -> Reply:
            return BROKEN if request.prompt == [13] else OK

        async with (
            PolicyServer(script) as server,
            PolicyClient([server.url], server_patience_seconds=0.5) as client,
        ):
            unlucky = asyncio.create_task(client.generate([13], SAMPLING, "unlucky"))
            while not unlucky.done():
                await client.generate([1], SAMPLING, "r")
                await asyncio.sleep(0.01)
            with pytest.raises(EpisodeFailed, match="loading") as failure:
                await unlucky
            assert failure.value.kind == "server"

    run(work())


def test_a_refused_request_fails_at_once_with_the_servers_words() -> None:
    async def work() -> None:
        refusal = Reply(status=400, error="the context is 512 tokens")
        async with PolicyServer(in_turn(refusal, OK)) as server, PolicyClient([server.url]) as client:
            with pytest.raises(EpisodeFailed, match="400: the context is 512 tokens") as failure:
                await client.generate([1], SAMPLING, "r")
            assert failure.value.kind == "server"
            assert (await client.generate([1], SAMPLING, "r")).tokens == [5, 6]
            assert len(server.requests) == 2 and client.num_retries == 0

    run(work())


def test_a_wrong_key_or_address_ends_the_run_at_once() -> None:
    async def work() -> None:
        async with PolicyServer(in_turn(OK), api_key="secret") as server:
            async with PolicyClient([server.url], api_key="guess") as client:
                with pytest.raises(PolicyServerError, match="401: the key is not right; check the address"):
                    await client.generate([1], SAMPLING, "r")
                with pytest.raises(PolicyServerError, match="401"):
                    await client.wait_for_version(0, 0)
            async with PolicyClient([server.url + "/other"], api_key="secret") as client:
                with pytest.raises(PolicyServerError, match="404: no route /other/generate"):
                    await client.generate([1], SAMPLING, "r")

    run(work())


@pytest.mark.parametrize("body", [b"<html>", b"\x81\xa6tokens\x91\xa1x"])
def test_an_answer_that_is_no_response_fails_the_episode(body: bytes) -> None:
    async def work() -> None:
        async with PolicyServer(in_turn(Reply(body=body))) as server, PolicyClient([server.url]) as client:
            with pytest.raises(EpisodeFailed, match="no GenerateResponse") as failure:
                await client.generate([1], SAMPLING, "r")
            assert failure.value.kind == "server"

    run(work())


def test_an_answer_to_another_request_fails_the_episode() -> None:
    async def work() -> None:
        body = encode_message(GenerateResponse("other", [5], [-0.1], [0], "stop"))
        async with PolicyServer(in_turn(Reply(body=body))) as server, PolicyClient([server.url]) as client:
            with pytest.raises(EpisodeFailed, match="answers request 'other' in place of 'r'"):
                await client.generate([1], SAMPLING, "r")

    run(work())


def test_a_draw_that_takes_too_long_is_a_timeout_and_its_connection_is_closed() -> None:
    async def work() -> None:
        async with (
            PolicyServer(in_turn(SLOW)) as server,
            PolicyClient([server.url], request_timeout_seconds=0.2) as client,
        ):
            with pytest.raises(EpisodeFailed, match=r"request_timeout_seconds = 0\.2") as failure:
                await client.generate([1, 2], SAMPLING, "r")
            assert failure.value.kind == "timeout"
            await until(lambda: server.num_aborted == 1)

    run(work())


def test_cancelling_an_episode_closes_the_connection_of_its_draw_only() -> None:
    async def work() -> None:
        tokenizer = byte_tokenizer()
        waits = Reply(encode(tokenizer, "a<|im_end|>"), delay_seconds=0.5)
        async with PolicyServer(in_turn(SLOW, waits)) as server, PolicyClient([server.url]) as client:
            runner = EpisodeRunner(client, TurnRenderer(tokenizer), 100)
            tasks = []
            for number in range(2):
                source = ScriptedSource([user("q")])
                episode = runner.run(source, {}, sampling=SamplingConfig(), seed=number)
                tasks.append(asyncio.create_task(episode))
                await until(lambda count=number + 1: len(server.requests) == count)
            tasks[0].cancel()
            await until(lambda: server.num_aborted == 1)
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            assert (await tasks[1]).messages[-1]["content"] == "a"
            assert server.num_aborted == 1 and server.num_running == 0

    run(work())


def test_an_episode_of_two_turns_over_http_grows_one_prompt() -> None:
    async def work() -> None:
        tokenizer = byte_tokenizer()
        replies = [Reply(encode(tokenizer, text), versions=None) for text in ("a<|im_end|>", "b<|im_end|>")]
        async with PolicyServer(in_turn(*replies), version=6) as server, PolicyClient([server.url]) as client:
            source = ScriptedSource([user("q")], [[tool("r")], None], max_turns=3)
            runner = EpisodeRunner(client, TurnRenderer(tokenizer), 200)
            episode = await runner.run(source, {}, sampling=SamplingConfig(), seed=1)
            first, second = server.requests
            assert second.prompt[: len(first.prompt) + 2] == [*first.prompt, *replies[0].tokens]
            assert episode.samples[0].tokens == [*second.prompt, *replies[1].tokens]
            assert (episode.oldest_version, episode.newest_version) == (6, 6)

    run(work())


def test_requests_go_to_the_least_loaded_server_within_reach() -> None:
    async def work() -> None:
        async with (
            PolicyServer(in_turn(SLOW)) as slow,
            PolicyServer(in_turn(OK)) as quick,
            PolicyServer(in_turn(BROKEN)) as broken,
            PolicyClient([slow.url, quick.url, broken.url]) as client,
        ):
            stuck = [asyncio.create_task(client.generate([1], SAMPLING, "s"))]
            await until(lambda: len(slow.requests) == 1)
            for number in range(30):
                assert (await client.generate([1], SAMPLING, f"r{number}")).tokens == [5, 6]
            assert len(slow.requests) == 1 and len(quick.requests) == 30
            assert 1 <= len(broken.requests) < 10
            stuck[0].cancel()

    run(work())


def test_equal_servers_share_requests_in_turn() -> None:
    async def work() -> None:
        async with (
            PolicyServer(in_turn(OK)) as first,
            PolicyServer(in_turn(OK)) as second,
            PolicyClient([first.url, second.url]) as client,
        ):
            for number in range(10):
                await client.generate([1], SAMPLING, f"r{number}")
            assert len(first.requests) == len(second.requests) == 5

    run(work())


def test_a_version_is_awaited_on_all_servers() -> None:
    async def work() -> None:
        async with (
            PolicyServer(in_turn(OK), version=3) as first,
            PolicyServer(in_turn(OK), version=2) as second,
            PolicyClient([first.url, second.url]) as client,
        ):
            assert await client.wait_for_version(0, 0) == 2
            assert await client.wait_for_version(3, timeout_seconds=0.2) == 2
            wait = asyncio.create_task(client.wait_for_version(4, timeout_seconds=20))
            await first.set_version(4)
            await asyncio.sleep(0.05)
            assert not wait.done()
            await second.set_version(5)
            assert await wait == 4
            assert len(first.calls) == len(second.calls) == 3

    run(work())


def test_waiting_for_a_version_goes_on_over_an_outage() -> None:
    async def work() -> None:
        server = PolicyServer(in_turn(OK))
        await server.start()
        async with PolicyClient([server.url], server_patience_seconds=20) as client:
            wait = asyncio.create_task(client.wait_for_version(1, timeout_seconds=20))
            await until(lambda: len(server.calls) == 1)
            await server.close()
            await asyncio.sleep(0.2)
            await server.start()
            await until(lambda: len(server.calls) == 2)
            await server.set_version(1)
            assert await wait == 1
        await server.close()

    run(work())


def test_draws_name_the_run_and_a_server_that_another_run_has_taken_ends_this_one() -> None:
    async def work() -> None:
        told = Reply(status=412, error="the weights are those of run b, not of run a")
        own, other = Origin("a", "t1"), Origin("b", "t2")
        async with (
            PolicyServer(in_turn(OK, told), version=3, origin=own) as server,
            PolicyClient([server.url], run_id="a") as client,
        ):
            await client.generate([1], SAMPLING, "r")
            assert server.requests[0].run_id == "a"
            with pytest.raises(
                PolicyServerError, match=r"those of run b, not of run a\): another run has taken"
            ):
                await client.generate([1], SAMPLING, "r")
            assert await client.wait_for_version(3, 1.0) == 3
            server.origin = other
            with pytest.raises(
                PolicyServerError, match=r"\(it has version 3 of run b\): another run has taken it"
            ):
                await client.wait_for_version(3, 1.0)
            assert await client.weights() == {server.url: VersionInfo(3, other)}

    run(work())
