"""What the engine draws: against a plain forward of the whole sequence, and alone against among others."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from contract.policy import GenerateRequest, Sampling
from inference.engine.embedded import EmbeddedEngine
from tests.support.tiny_model import write_tiny_model
from tests.unit.inference.engine.support import Answer, ask, plain_logits, reference, serving, until_drawn


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_log_probabilities_are_those_of_a_plain_forward(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / family, family=family, tie=family != "qwen2")
    prompts = [[1, 20 + i, 30, 40 + i] * (i + 1) for i in range(6)]

    async def run() -> list[Answer]:
        async with serving(folder) as engine:
            return await asyncio.gather(
                *(
                    ask(engine, prompt, seed=i, max_tokens=70 + i, temperature=0.5 + 0.25 * i)
                    for i, prompt in enumerate(prompts)
                )
            )

    model = reference(folder)
    for i, (prompt, answer) in enumerate(zip(prompts, asyncio.run(run()), strict=True)):
        assert (len(answer.tokens), answer.finish_reason) == (70 + i, "length")
        logits = plain_logits(model, prompt, answer.tokens) / (0.5 + 0.25 * i)
        expected = torch.log_softmax(logits, -1)[torch.arange(70 + i), answer.tokens]
        assert torch.allclose(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-5)


def test_temperature_zero_is_greedy(llama: Path) -> None:
    async def run() -> Answer:
        async with serving(llama) as engine:
            return await ask(engine, [1, 5, 9], temperature=0.0, top_k=3, top_p=0.5, max_tokens=40)

    answer = asyncio.run(run())
    logits = plain_logits(reference(llama), [1, 5, 9], answer.tokens)
    assert answer.tokens == logits.argmax(-1).tolist()
    expected = torch.log_softmax(logits, -1).amax(-1)
    assert torch.allclose(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-5)


async def _noise(engine: EmbeddedEngine, rng: random.Random) -> None:
    await asyncio.sleep(rng.random() * 0.15)
    prompt = [rng.randrange(259) for _ in range(rng.randrange(1, 150))]
    await ask(engine, prompt, max_tokens=rng.randrange(1, 60), top_k=rng.choice([0, 9]), temperature=1.5)


@pytest.mark.parametrize("max_batch", [2, 7, 32])
def test_a_request_draws_the_same_bits_alone_and_among_others(llama: Path, max_batch: int) -> None:
    prompts = [[1, 2, 3], [7] * 60, [9, 8] * 40]

    async def run() -> tuple[list[Answer], list[Answer]]:
        async with serving(llama, max_batch=max_batch) as engine:
            alone = [await ask(engine, prompt, seed=11, max_tokens=70, top_p=0.95) for prompt in prompts]
            rng = random.Random(max_batch)
            noise = [asyncio.create_task(_noise(engine, rng)) for _ in range(min(4 * max_batch, 24))]
            crowded = []
            for prompt in prompts * 3:
                await asyncio.sleep(rng.random() * 0.05)
                crowded.append(asyncio.create_task(ask(engine, prompt, seed=11, max_tokens=70, top_p=0.95)))
            results = await asyncio.gather(*crowded)
            await asyncio.gather(*noise)
            return alone, results

    alone, crowded = asyncio.run(run())
    assert len(crowded) == 9
    for i, answer in enumerate(crowded):
        assert answer.bits == alone[i % 3].bits


def test_seeds_decide_and_no_seed_draws_anew(llama: Path) -> None:
    seeds = (5, 5, 6, -3, 2**63, None, None)

    async def run() -> list[Answer]:
        async with serving(llama) as engine:
            return [await ask(engine, [1, 2], seed=seed, max_tokens=30) for seed in seeds]

    drawn = [tuple(answer.tokens) for answer in asyncio.run(run())]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 6


def test_a_group_with_one_prompt_is_prefilled_once(llama: Path) -> None:
    async def run() -> tuple[int, int, list[Answer], list[Answer]]:
        async with serving(llama, max_batch=3) as engine:
            group = await asyncio.gather(
                *(ask(engine, [1, 4, 4, 8], seed=i, max_tokens=20) for i in range(8))
            )
            prefills = engine.stats().num_prefills
            single = [await ask(engine, [1, 4, 4, 8], seed=i, max_tokens=20) for i in range(8)]
            assert engine.stats().num_prompt_tokens == 16 * 4
            return prefills, engine.stats().num_prefills, group, single

    first, last, group, single = asyncio.run(run())
    assert (first, last) == (1, 1)
    assert [answer.bits for answer in group] == [answer.bits for answer in single]
    assert len({tuple(answer.tokens) for answer in group}) == 8


def test_a_shared_prompt_draws_what_one_of_its_own_does(llama: Path) -> None:
    async def run() -> tuple[Answer, Answer]:
        async with serving(llama, max_batch=2) as engine:
            own = await ask(engine, [1, 6, 6], seed=1, max_tokens=70)
            # Others take both slots, so that the prompt is computed again, and then shared.
            for prompt in ([2, 2], [3, 3], [4, 4]):
                await ask(engine, prompt, max_tokens=3)
            long = asyncio.create_task(ask(engine, [1, 6, 6], seed=2, max_tokens=90))
            shared = await ask(engine, [1, 6, 6], seed=1, max_tokens=70)
            await long
            assert engine.stats().num_prefills == 5
            return own, shared

    own, shared = asyncio.run(run())
    assert own.bits == shared.bits


def test_sequences_end_at_the_models_length(llama: Path) -> None:
    async def run() -> tuple[Answer, Answer]:
        async with serving(llama, max_len=20) as engine:
            assert engine.max_len == 20
            return (
                await ask(engine, [1] * 15, max_tokens=100, seed=0),
                await ask(engine, [1] * 19, max_tokens=100, seed=0),
            )

    first, second = asyncio.run(run())
    assert (len(first.tokens), first.finish_reason) == (5, "length")
    assert (len(second.tokens), second.finish_reason) == (1, "length")


def test_leaving_a_request_frees_its_slot(llama: Path) -> None:
    async def run() -> None:
        async with serving(llama, max_batch=1) as engine:
            stream = engine.draw(GenerateRequest("left", [1, 2], Sampling(max_tokens=400)))
            await anext(stream)
            waiting = asyncio.create_task(ask(engine, [3], max_tokens=400))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await stream.aclose()
            answer = await ask(engine, [4], max_tokens=5)
            assert answer.finish_reason == "length"
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            # Neither the one that left nor the one that waited was drawn to its end.
            assert stats.num_drawn_tokens < 400

    asyncio.run(run())


def test_closing_aborts_what_runs_and_refuses_what_comes(llama: Path) -> None:
    async def run() -> None:
        async with serving(llama, max_batch=1) as engine:
            answer = Answer()
            running = asyncio.create_task(ask(engine, [1, 2], into=answer, max_tokens=500))
            waiting = asyncio.create_task(ask(engine, [1, 2], max_tokens=500))
            await until_drawn(answer, 3)
            await engine.close()
            assert (await running).finish_reason == "abort"
            assert 3 <= len(answer.tokens) < 500
            assert (await waiting).finish_reason == "abort"
            with pytest.raises(Exception, match="closed"):
                await ask(engine, [1, 2])

    asyncio.run(run())
