"""Where sequences end, and which requests are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from contract.policy import GenerateRequest, Sampling
from inference.engine.sequence import StopTexts, check_request
from tests.unit.inference.engine.support import ask, plain_logits, reference, serving


def _find_plainly(tokenizer: Any, tokens: list[int], stops: list[str], first: int = 0) -> int | None:
    """The first token, from `first` on, with which the whole text has one more place where a stop ends."""

    def ends(count: int) -> set[tuple[int, str]]:
        text = tokenizer.decode(tokens[:count]).rstrip("\ufffd")
        return {
            (start + len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start)
        }

    for count in range(first + 1, len(tokens) + 1):
        if ends(count) - ends(count - 1):
            return count - 1
    return None


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("one two three", ["two"]),
        ("aaab aab ab b", ["aab", "b"]),
        ("naïve 🙂 café", ["🙂"]),
        ("naïve 🙂 café", ["é", " c"]),
        ("hello<|im_end|> there", ["<|im_end|>"]),
        ("x\n\ny\n\n\nz", ["\n\n\n"]),
        ("nothing here", ["absent"]),
    ],
)
def test_stop_texts_are_found_with_the_token_that_completes_them(
    text: str, stops: list[str], llama: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(stops)
    for first in range(len(tokens)):
        search = StopTexts(tokenizer, stops)
        hits = [search.push(token) for token in tokens]
        expected = _find_plainly(tokenizer, tokens, stops, first)
        assert next((i for i in range(first, len(tokens)) if hits[i]), None) == expected


def test_a_stop_token_ends_the_sequence_and_is_its_last_token(llama: Path) -> None:
    async def run() -> None:
        async with serving(llama) as engine:
            free = await ask(engine, [1, 2], seed=3, max_tokens=60)
            assert free.finish_reason == "length"
            stop = free.tokens[20]
            first = free.tokens.index(stop)
            stopped = await ask(engine, [1, 2], seed=3, max_tokens=60, stop_ids=[stop])
            assert stopped.bits == (free.tokens[: first + 1], free.logprobs[: first + 1])
            assert stopped.finish_reason == "stop"

    asyncio.run(run())


def test_a_stop_text_ends_the_sequence_and_min_tokens_puts_it_off(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)

    async def run() -> None:
        async with serving(llama) as engine:
            free = await ask(engine, [1, 2], seed=3, max_tokens=100)
            # Text of three tokens, somewhere in the middle.
            stop = next(
                text
                for i in range(20, 90)
                if len(text := tokenizer.decode(free.tokens[i : i + 3])) == 3 and "\ufffd" not in text
            )
            first = _find_plainly(tokenizer, free.tokens, [stop])
            assert first is not None
            stopped = await ask(engine, [1, 2], seed=3, max_tokens=100, stop=[stop])
            assert (stopped.tokens, stopped.finish_reason) == (free.tokens[: first + 1], "stop")
            later = await ask(engine, [1, 2], seed=3, max_tokens=100, stop=[stop], min_tokens=first + 1)
            assert len(later.tokens) > first + 1

    asyncio.run(run())


def test_before_min_tokens_end_tokens_are_masked_and_log_probabilities_know_it(llama: Path) -> None:
    stops = list(range(0, 250))

    async def run() -> Any:
        async with serving(llama) as engine:
            return await ask(
                engine, [1, 2], seed=3, max_tokens=60, stop_ids=stops, min_tokens=8, temperature=1.5
            )

    answer = asyncio.run(run())
    assert answer.finish_reason == "stop"
    assert len(answer.tokens) > 8
    assert all(token >= 250 for token in answer.tokens[:-1])
    assert answer.tokens[-1] < 250
    logits = plain_logits(reference(llama), [1, 2], answer.tokens) / 1.5
    logits[:8, :250] = float("-inf")
    expected = torch.log_softmax(logits, -1)[torch.arange(len(answer.tokens)), answer.tokens]
    assert torch.allclose(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 259], {}, "token 259 of the prompt is unknown"),
        ([-1], {}, "token -1 of the prompt is unknown"),
        ([1] * 32, {}, "has 32 tokens, and sequences may have 32"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"min_tokens": -1}, "min_tokens"),
        ([1], {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ([1], {"seed": 2**64}, "seed"),
        ([1], {"stop_ids": [300]}, "stop_ids"),
        ([1], {"stop_ids": list(range(259)), "min_tokens": 1}, "leaves nothing to draw"),
        ([1], {"stop": [""]}, "not empty"),
    ],
)
def test_requests_that_cannot_be_drawn_are_refused(
    prompt: list[int], sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(GenerateRequest("r", prompt, Sampling(**sampling)), vocab_size=259, max_len=32)


def test_a_refusal_comes_before_anything_is_drawn(llama: Path) -> None:
    async def run() -> None:
        async with serving(llama) as engine:
            with pytest.raises(ValueError, match="the prompt is empty"):
                engine.draw(GenerateRequest("r", [], Sampling()))

    asyncio.run(run())
