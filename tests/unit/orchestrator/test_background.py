"""Work beside the main loop: nothing fails unseen, nothing is waited for without a limit."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from contract.errors import ChannelError
from orchestrator.background import Background, LoopLag, run_all, time_limit


def test_the_first_error_of_any_task_is_raised() -> None:
    async def fail(text: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        raise ValueError(text)

    async def main() -> None:
        background = Background()
        background.start(fail("second", 0.02), "b")
        background.start(fail("first", 0.0), "a")
        await asyncio.wait_for(background.changed.wait(), 5)
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="first"):
            background.raise_if_failed()
        await background.close()

    asyncio.run(main())


def test_closing_ends_what_still_runs() -> None:
    ended = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def main() -> None:
        background = Background()
        background.start(wait(), "a")
        await asyncio.sleep(0)
        await background.close()
        background.raise_if_failed()

    asyncio.run(main())
    assert ended == [True]


@pytest.mark.parametrize("how", ["error", "cancel"])
def test_of_works_that_belong_together_none_outlives_the_others(how: str) -> None:
    running: set[int] = set()

    async def work(number: int) -> int:
        running.add(number)
        try:
            await asyncio.sleep(0.01 if number == 1 else 60)
            if how == "error":
                raise ValueError("one fails")
            await asyncio.sleep(60)
        finally:
            running.discard(number)
        return number

    async def main() -> None:
        task = asyncio.ensure_future(run_all(work(number) for number in range(4)))
        await asyncio.sleep(0.005)
        assert running == {0, 1, 2, 3}
        if how == "cancel":
            task.cancel()
        with pytest.raises(ValueError if how == "error" else asyncio.CancelledError):
            await task
        assert running == set()

    asyncio.run(main())


def test_results_come_in_order() -> None:
    async def work(number: int) -> int:
        await asyncio.sleep(0.01 * (3 - number))
        return number

    assert asyncio.run(run_all(work(number) for number in range(3))) == [0, 1, 2]


def test_a_wait_beyond_its_limit_says_what_it_was_for() -> None:
    async def main() -> None:
        async with time_limit(0.01, "the answer", ChannelError):
            await asyncio.sleep(60)

    with pytest.raises(ChannelError, match=r"the answer took longer than 0\.01 s"):
        asyncio.run(main())


def test_a_timeout_of_the_body_itself_is_left_alone() -> None:
    async def main() -> None:
        async with time_limit(60, "the answer", ChannelError):
            raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        asyncio.run(main())


def test_a_loop_that_stands_still_is_measured_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    async def main() -> float:
        lag = LoopLag(beat)
        task = asyncio.ensure_future(lag.run())
        await asyncio.sleep(0.01)
        time.sleep(1.5)
        await asyncio.sleep(0.01)
        task.cancel()
        measured = lag.take()
        assert lag.take() == 0.0
        return measured

    with caplog.at_level(logging.WARNING):
        measured = asyncio.run(main())
    assert measured > 1.0 and beats == 2
    assert "stood still for 1." in caplog.text
