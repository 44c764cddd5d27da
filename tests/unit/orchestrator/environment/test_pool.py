from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from orchestrator.environment.failure import EpisodeFailed
from orchestrator.environment.pool import LoadedSource, load_sources

from .sources import config_of, gone, is_alive, order, running


async def _failure(awaitable: Any) -> EpisodeFailed:
    with pytest.raises(EpisodeFailed) as caught:
        await awaitable
    return caught.value


@pytest.mark.parametrize("name", ["Echo", "AsyncEcho"])
def test_sync_and_async_environments_keep_one_contract(name: str) -> None:
    async def run() -> None:
        async with running(name, settings={"num_tasks": 5, "offset": 10}) as source:
            assert (source.title, source.num_tasks, source.max_turns, source.tools) == (name, 5, 1, [])
            task = await source.task(3)
            assert task == {"answer": "13"}
            messages = await source.start(task)
            assert messages == [{"role": "user", "content": "Say 13."}]
            assert await source.respond(task, [*messages, _says("13")], {"a": 1}) == (None, {"a": 1})
            assert await source.reward(task, [*messages, _says("13")], {}) == {"reward": 1.0}
            assert await source.reward(task, [*messages, _says("12")], {}) == {"reward": 0.0}
            assert source.counters.calls == 5

    asyncio.run(run())


def test_the_state_of_an_episode_travels_with_its_calls() -> None:
    async def run() -> None:
        async with running("Counting", num_workers=2) as source:

            async def play(index: int) -> dict[str, float]:
                task = await source.task(index)
                messages, state, answer = await source.start(task), {}, []
                while answer is not None:
                    messages = [*messages, *answer, _says("x")]
                    answer, state = await source.respond(task, messages, state)
                assert [m["content"] for m in messages if m["role"] == "user"][1:] == ["again, 1", "again, 2"]
                return await source.reward(task, messages, state)

            rewards = await asyncio.gather(*(play(index) for index in range(20)))
            assert rewards == [{"reward": 0.5, "turns": 3.0}] * 20

    asyncio.run(run())


def test_more_hanging_calls_than_workers_do_not_exhaust_the_pool() -> None:
    async def run() -> None:
        async with running("Naughty", num_workers=2, timeout_seconds=0.3) as source:
            hanging = [order(source, "hang" if k % 2 else "async hang") for k in range(6)]
            good = [order(source, "1") for _ in range(20)]
            results = await asyncio.gather(*hanging, *good, return_exceptions=True)
            assert results[6:] == [1.0] * 20
            assert [getattr(result, "kind", None) for result in results[:6]] == ["timeout"] * 6
            assert "took longer than 0.3 s" in str(results[0])
            assert source.counters.failures == {"environment": 0, "timeout": 6, "worker": 0}
            assert await order(source, "1") == 1.0
            assert source.counters.workers_replaced == 6

    asyncio.run(run())


def test_calls_behind_a_hanging_one_are_answered_once_its_worker_is_replaced() -> None:
    async def run() -> None:
        async with running("Naughty", timeout_seconds=0.5) as source:
            await _warm_up(source)
            hanging = asyncio.create_task(order(source, "hang"))
            await asyncio.sleep(0)
            assert await asyncio.gather(*(order(source, "1") for _ in range(100))) == [1.0] * 100
            assert (await _failure(hanging)).kind == "timeout"
            assert source.counters.workers_replaced == 1

    asyncio.run(run())


def test_calls_behind_a_slow_one_go_to_another_worker_before_it_ends() -> None:
    async def run() -> None:
        async with running("Naughty", num_workers=2, timeout_seconds=3600) as source:
            await _warm_up(source)
            slow = asyncio.create_task(order(source, "hang"))
            await asyncio.sleep(0)
            # More than one worker is sent ahead: some of them stand behind the slow one.
            assert await asyncio.gather(*(order(source, "1") for _ in range(200))) == [1.0] * 200
            assert not slow.done()
            assert source.counters.workers_replaced == 0

    asyncio.run(run())


def test_an_answer_that_is_late_but_in_time_is_the_result_of_its_own_call() -> None:
    async def run() -> None:
        async with running("Naughty", num_workers=2, timeout_seconds=60) as source:
            await _warm_up(source)
            texts = ["sleep 0.6", *(["1", "2"] * 50), "sleep 0.6"]
            results = await asyncio.gather(*(order(source, text) for text in texts))
            assert results == [1.0, *([1.0, 0.0] * 50), 1.0]
            # The slow worker answers the calls that were taken from it, too: they do not count again.
            await asyncio.sleep(0.2)
            assert source.counters.calls == 10 + 102
            assert source.counters.failures == {"environment": 0, "timeout": 0, "worker": 0}

    asyncio.run(run())


def test_an_exception_fails_its_call_only_and_shows_the_line_of_the_user() -> None:
    async def run() -> None:
        async with running("Naughty") as source:
            before = source.worker_pids
            failure = await _failure(order(source, "raise"))
            assert failure.kind == "environment"
            assert "LookupError: no such answer" in failure.message
            assert 'raise LookupError("no such answer")' in failure.message
            assert "worker.py" not in failure.message and "calls.py" not in failure.message
            assert (await _failure(order(source, "quit"))).kind == "environment"
            assert await order(source, "1") == 1.0
            assert source.worker_pids == before and source.counters.workers_replaced == 0
            assert source.counters.failures["environment"] == 2

    asyncio.run(run())


@pytest.mark.parametrize("what", ["nan", "inf", "text", "none", "keys"])
def test_what_is_no_reward_is_a_failure(what: str) -> None:
    async def run() -> None:
        async with running("Naughty") as source:
            failure = await _failure(order(source, f"return {what}"))
            assert failure.kind == "environment" and "Naughty.reward" in failure.message

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exit 3", "exit code 3"),
        ("segfault", "SIGSEGV"),
        ("signal 40", "signal 40"),
        ("fork", "exit code 1"),
    ],
)
def test_a_worker_that_dies_fails_the_call_it_was_at_and_is_replaced(text: str, words: str) -> None:
    async def run() -> None:
        async with running("Naughty") as source:
            await _warm_up(source)
            [before] = source.worker_pids
            dying = asyncio.create_task(order(source, text))
            await asyncio.sleep(0)
            assert await asyncio.gather(*(order(source, "1") for _ in range(50))) == [1.0] * 50
            failure = await _failure(dying)
            assert failure.kind == "worker" and words in failure.message
            assert source.worker_pids != [before]
            assert source.counters.workers_replaced == 1

    asyncio.run(run())


def test_an_idle_worker_that_dies_is_replaced() -> None:
    async def run() -> None:
        async with running("Naughty") as source:
            [before] = source.worker_pids
            os.kill(before, 9)
            while source.counters.workers_replaced == 0 or not source.worker_pids:
                await asyncio.sleep(0.01)
            assert await order(source, "pid") == source.worker_pids[0] != before
            assert source.counters.failures["worker"] == 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_what_an_environment_prints_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with running("Naughty") as source:
            assert await order(source, "print") == 1.0

    asyncio.run(run())
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "printed by an environment" in printed.err and "written by an environment" in printed.err


def test_user_code_runs_on_the_main_thread_and_outlives_ctrl_c() -> None:
    async def run() -> None:
        async with running("Naughty") as source:
            assert await order(source, "thread") == 1.0
            before = source.worker_pids
            assert await order(source, "interrupt") == 1.0
            assert await order(source, "1") == 1.0 and source.worker_pids == before

    asyncio.run(run())


def test_a_process_that_a_hanging_call_has_started_is_ended_with_it(tmp_path: Any) -> None:
    async def run() -> None:
        path = tmp_path / "pid"
        async with running("Naughty", timeout_seconds=1.0) as source:
            failure = await _failure(order(source, "hang child", pid_file=str(path)))
            assert failure.kind == "timeout"
            await gone(int(path.read_text()))

    asyncio.run(run())


def test_a_process_that_a_call_has_started_ends_when_the_source_is_closed(tmp_path: Any) -> None:
    async def run() -> None:
        path = tmp_path / "pid"
        async with running("Naughty") as source:
            assert await order(source, "start", pid_file=str(path)) == 0.0
            assert is_alive(int(path.read_text()))
        await gone(int(path.read_text()))

    asyncio.run(run())


def test_a_call_that_comes_back_in_a_forked_process_too_is_answered_once() -> None:
    async def run() -> None:
        async with running("Naughty") as source:
            await _warm_up(source)
            orders = [order(source, "twice" if i % 5 == 0 else "1") for i in range(50)]
            assert await asyncio.gather(*orders) == [1.0] * 50
            assert source.counters.workers_replaced == 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_answers_that_nobody_asked_for_end_the_worker_and_no_call_waits_for_ever() -> None:
    async def run() -> None:
        async with running("Naughty") as source:
            await _warm_up(source)
            orders = [order(source, "forge" if i == 3 else "1") for i in range(10)]
            for found in await asyncio.gather(*orders, return_exceptions=True):
                assert found == 1.0 or (isinstance(found, EpisodeFailed) and found.kind == "worker")
            while source.counters.workers_replaced == 0:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_values_that_json_cannot_hold_are_a_failure() -> None:
    async def run() -> None:
        async with running("NotJson") as source:
            failure = await _failure(source.task(0))
            assert failure.kind == "environment" and "NotJson.task" in failure.message

    asyncio.run(run())


def test_a_cancelled_call_leaves_the_pool_usable() -> None:
    async def run() -> None:
        async with running("Naughty", timeout_seconds=0.5) as source:
            calls = [asyncio.create_task(order(source, text)) for text in ("hang", "1", "1")]
            await asyncio.sleep(0.05)
            for call in calls[:2]:
                call.cancel()
            assert await calls[2] == 1.0
            assert await order(source, "1") == 1.0

    asyncio.run(run())


def test_close_ends_hanging_workers_and_cancels_their_calls() -> None:
    async def run() -> None:
        configs = [config_of("Naughty", name=name, timeout_seconds=3600) for name in ("a", "b")]
        sources = await load_sources(configs)
        hanging = asyncio.create_task(order(sources[0], "hang"))
        pids = [pid for source in sources for pid in source.worker_pids]
        await asyncio.sleep(0.05)
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
        for source in sources:
            await source.close()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert not any(is_alive(pid) for pid in pids)
        with pytest.raises(RuntimeError, match="closed"):
            await sources[0].task(0)
        await sources[0].close()

    asyncio.run(run())


async def _warm_up(source: LoadedSource) -> None:
    """Let the pool learn that calls are short, so that it sends some ahead."""
    for _ in range(10):
        assert await order(source, "1") == 1.0


def _says(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}
