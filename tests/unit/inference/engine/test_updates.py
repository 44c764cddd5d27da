"""Pauses and new weights, in the middle of what is being drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import PolicyServerError, PublishError
from contract.policy import PauseMode
from tests.support.tiny_model import write_tiny_model
from tests.unit.inference.engine.support import (
    Answer,
    ask,
    plain_logits,
    reference,
    serving,
    until_drawn,
    weights_of,
)


def plain_logprobs(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    logits = plain_logits(model, prompt, tokens)
    return torch.log_softmax(logits, -1)[torch.arange(len(tokens)), tokens]


def close(logprobs: list[float], expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)


async def _update_in_the_middle(
    llama: Path, other: Path, mode: PauseMode
) -> tuple[Answer, Answer, Answer, int]:
    """Two are running and one waits while version 3 is loaded. Returns the first that ran, the one that
    waited, one that came later with the prompt of the first, and the prefills.
    """
    async with serving(llama, max_batch=2) as engine:
        first = Answer()
        running = [
            asyncio.create_task(ask(engine, [1, 8, 8], into=first, seed=1, max_tokens=400)),
            asyncio.create_task(ask(engine, [1, 8, 9], seed=1, max_tokens=400)),
        ]
        await until_drawn(first, 20)
        waiting = asyncio.create_task(ask(engine, [1, 8, 8], seed=2, max_tokens=5))
        await asyncio.sleep(0)
        await engine.load(weights_of(other), 3, mode)
        assert (engine.version, engine.is_paused, engine.stats().num_updates) == (3, False, 1)
        await asyncio.gather(*running)
        last = await ask(engine, [1, 8, 8], seed=1, max_tokens=20)
        return first, await waiting, last, engine.stats().num_prefills


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_each_token_carries_the_version_that_drew_it(mode: PauseMode, llama: Path, other_llama: Path) -> None:
    first, waited, last, num_prefills = asyncio.run(_update_in_the_middle(llama, other_llama, mode))
    old, new = reference(llama), reference(other_llama)
    num_old = first.versions.count(0)
    assert first.versions == [0] * num_old + [3] * (len(first.tokens) - num_old)
    assert num_old >= 20
    expected = plain_logprobs(old, [1, 8, 8], first.tokens)
    assert close(first.logprobs[:num_old], expected[:num_old])
    if mode == "keep":
        assert (len(first.tokens), first.finish_reason) == (400, "length")
        assert num_old < 400
        assert not close(first.logprobs[num_old:], expected[num_old:])
    elif mode == "wait":
        assert (num_old, first.finish_reason) == (400, "length")
    else:
        assert (num_old, first.finish_reason) == (len(first.tokens), "abort")
        assert num_old < 400
    # What begins after the update is drawn from the new weights alone: no stale prefix.
    for answer in (waited, last):
        assert set(answer.versions) == {3}
        assert close(answer.logprobs, plain_logprobs(new, [1, 8, 8], answer.tokens))
    assert num_prefills == 3


def test_after_an_update_the_engine_draws_as_one_that_began_with_these_weights(
    llama: Path, other_llama: Path
) -> None:
    async def run() -> tuple[Answer, Answer]:
        async with serving(llama) as engine, serving(other_llama) as other:
            await ask(engine, [1, 2, 3], seed=4, max_tokens=30)
            # The head is tied to the embeddings: it may come as well.
            tensors = dict(weights_of(other_llama))
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            await engine.load(iter(tensors.items()), 1, "keep")
            return (
                await ask(engine, [1, 2, 3], seed=4, max_tokens=30),
                await ask(other, [1, 2, 3], seed=4, max_tokens=30),
            )

    updated, fresh = asyncio.run(run())
    assert updated.bits == fresh.bits
    assert set(updated.versions) == {1}


def _wrong(kind: str, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights_of(folder):
        if name != "model.norm.weight":
            yield name, tensor
    norm = torch.ones(64)
    match kind:
        case "missing":
            return
        case "shape":
            yield "model.norm.weight", torch.ones(65)
        case "kind":
            yield "model.norm.weight", norm.int()
        case "unknown":
            yield "model.norm.weight", norm
            yield "model.other.weight", norm
        case "twice":
            yield "model.norm.weight", norm
            yield "model.norm.weight", norm
        case "untied":
            yield "model.norm.weight", norm
            yield "lm_head.weight", torch.zeros(259, 64)
        case "unreadable":
            raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "1 weights of the served model are not in the new ones: model.norm.weight"),
        ("shape", r"shape \[65\] in the new weights and \[64\]"),
        ("kind", "int32"),
        ("unknown", "'model.other.weight', which is no weight"),
        ("twice", "twice"),
        ("untied", "are one weight"),
        ("unreadable", "the disk is gone"),
    ],
)
def test_wrong_weights_are_refused_and_change_nothing(
    kind: str, message: str, llama: Path, other_llama: Path
) -> None:
    async def run() -> None:
        async with serving(llama, max_batch=1) as engine:
            before = await ask(engine, [1, 2], seed=1, max_tokens=10)
            with pytest.raises(PublishError, match=message):
                await engine.load(_wrong(kind, other_llama), 1, "abort")
            after = await ask(engine, [1, 2], seed=1, max_tokens=10)
            assert (engine.version, engine.is_paused) == (0, False)
            assert engine.stats().num_updates == 0
            assert before.bits == after.bits

    asyncio.run(run())


def test_nothing_is_drawn_or_admitted_in_a_pause_and_all_goes_on_after_it(llama: Path) -> None:
    async def run() -> None:
        async with serving(llama, max_batch=4) as engine:
            alone = await ask(engine, [1, 2], seed=1, max_tokens=200)
            answer = Answer()
            running = asyncio.create_task(ask(engine, [1, 2], into=answer, seed=1, max_tokens=200))
            await until_drawn(answer, 5)
            await engine.pause("keep")
            waiting = asyncio.create_task(ask(engine, [3, 4], max_tokens=3))
            drawn = engine.stats().num_drawn_tokens
            await asyncio.sleep(0.1)
            stats = engine.stats()
            assert (stats.num_drawn_tokens, stats.num_running, stats.num_waiting) == (drawn, 1, 1)
            assert engine.is_paused
            await engine.resume()
            assert (await running).bits == alone.bits
            assert len((await waiting).tokens) == 3

    asyncio.run(run())


def test_a_pause_that_waits_lets_those_finish_that_run_and_admits_none(llama: Path) -> None:
    async def run() -> None:
        async with serving(llama, max_batch=4) as engine:
            answer = Answer()
            running = asyncio.create_task(ask(engine, [1, 2], into=answer, seed=1, max_tokens=150))
            await until_drawn(answer, 5)
            pausing = asyncio.create_task(engine.pause("wait"))
            await asyncio.sleep(0)
            late = asyncio.create_task(ask(engine, [3, 4], max_tokens=3))
            await pausing
            assert (await running).finish_reason == "length"
            await asyncio.sleep(0.05)
            assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 1)
            await engine.resume()
            assert len((await late).tokens) == 3

    asyncio.run(run())


def test_an_update_in_a_pause_leaves_it_paused(llama: Path, other_llama: Path) -> None:
    async def run() -> None:
        async with serving(llama) as engine:
            answer = Answer()
            running = asyncio.create_task(ask(engine, [1, 2], into=answer, max_tokens=300))
            await until_drawn(answer, 5)
            await engine.pause("keep")
            # Also a mode that would wait for the end of what the pause holds.
            await engine.load(weights_of(other_llama), 1, "wait")
            assert (engine.version, engine.is_paused) == (1, True)
            await engine.resume()
            assert set((await running).versions) == {0, 1}

    asyncio.run(run())


def test_an_update_whose_caller_leaves_does_not_stop_the_engine(llama: Path, other_llama: Path) -> None:
    async def run() -> None:
        async with serving(llama) as engine:
            answer = Answer()
            running = asyncio.create_task(ask(engine, [1, 2], into=answer, max_tokens=400))
            await until_drawn(answer, 5)
            loading = asyncio.create_task(engine.load(weights_of(other_llama), 1, "wait"))
            async with asyncio.timeout(30):
                while not engine.is_paused:
                    await asyncio.sleep(0.001)
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            assert (await running).finish_reason == "length"
            assert len((await ask(engine, [5], max_tokens=3)).tokens) == 3
            assert not engine.is_paused

    asyncio.run(run())


def test_weights_that_are_not_finite_end_requests_and_good_ones_mend_it(llama: Path) -> None:
    async def run() -> None:
        async with serving(llama, max_batch=2) as engine:
            before = await ask(engine, [1, 2], seed=1, max_tokens=90)
            broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights_of(llama)}
            await engine.load(iter(broken.items()), 1, "keep")
            for prompt in ([1, 2], [1] * 100):
                with pytest.raises(PolicyServerError, match="logits of version 1 are not finite"):
                    await ask(engine, prompt, max_tokens=5)
            await engine.load(weights_of(llama), 2, "keep")
            after = await asyncio.gather(*(ask(engine, [1, 2], seed=1, max_tokens=90) for _ in range(3)))
            assert [answer.bits for answer in after] == [before.bits] * 3
            assert engine.failure is None

    asyncio.run(run())


def test_an_error_in_the_engine_fails_running_waiting_and_later_requests(llama: Path, tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    def fail(lm: Any) -> None:
        raise Broken("out of memory")

    async def run() -> None:
        async with serving(llama, max_batch=1) as engine:
            answer = Answer()
            running = asyncio.create_task(ask(engine, [1, 2], into=answer, max_tokens=500))
            waiting = asyncio.create_task(ask(engine, [1, 2], max_tokens=500))
            await until_drawn(answer, 3)
            # A defect anywhere in a forward; a hook is the plainest place to put one.
            engine._model.lm.model.norm.register_forward_hook(lambda *_: fail(None))
            for task in (running, waiting):
                with pytest.raises(PolicyServerError, match="out of memory"):
                    await task
            with pytest.raises(PolicyServerError, match="out of memory"):
                await ask(engine, [1, 2])
            with pytest.raises(PolicyServerError, match="out of memory"):
                await engine.pause("keep")
            assert isinstance(engine.failure and engine.failure.__cause__, Broken)

    asyncio.run(run())


def test_a_model_with_a_head_of_its_own_needs_the_head(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "untied", tie=False)

    async def run() -> None:
        async with serving(folder) as engine:
            tensors = dict(weights_of(folder))
            await engine.load(iter(tensors.items()), 1, "keep")
            del tensors["lm_head.weight"]
            with pytest.raises(PublishError, match="are not in the new ones: lm_head"):
                await engine.load(iter(tensors.items()), 2, "keep")

    asyncio.run(run())
