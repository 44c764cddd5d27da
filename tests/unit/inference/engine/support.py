"""Engines over tiny models, and what they ought to draw: plain forwards, in the tests' own words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from contract.policy import FinishReason, GenerateRequest, Sampling
from contract.sections import ModelFilesConfig
from inference.config import EmbeddedEngineConfig, InferenceConfig
from inference.engine.build import build_engine
from inference.engine.embedded import EmbeddedEngine

WAIT_SECONDS = 60.0


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    """An engine on the CPU."""
    max_batch = settings.pop("max_batch", 4)
    engine = build_engine(
        InferenceConfig(
            model=ModelFilesConfig(name=str(folder)),
            engine=EmbeddedEngineConfig(max_batch=max_batch),
            device="cpu",
            num_threads=2,
            **settings,
        )
    )
    try:
        yield engine
    finally:
        await engine.close()


class Answer:
    """All that a request has drawn."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def bits(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs


async def ask(
    engine: EmbeddedEngine, prompt: list[int], *, into: Answer | None = None, **sampling: Any
) -> Answer:
    """Draw a whole sequence; `into` can be looked at meanwhile."""
    answer = into or Answer()
    async with asyncio.timeout(WAIT_SECONDS):
        async for drawn in engine.draw(GenerateRequest("request", prompt, Sampling(**sampling))):
            assert len(drawn.tokens) == len(drawn.logprobs) == len(drawn.versions)
            answer.tokens += drawn.tokens
            answer.logprobs += drawn.logprobs
            answer.versions += drawn.versions
            answer.finish_reason = drawn.finish_reason
    return answer


async def until_drawn(answer: Answer, count: int) -> None:
    """Wait until `answer` has so many tokens."""
    async with asyncio.timeout(WAIT_SECONDS):
        while len(answer.tokens) < count:
            await asyncio.sleep(0.001)


def reference(folder: Path) -> Any:
    """The model as transformers loads it, with its own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def plain_logits(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), V] that each token was drawn from: one forward, no cache."""
    output = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False)
    return output.logits[0, len(prompt) - 1 :].float()


def weights_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the files in a model folder."""
    yield from load_file(folder / "model.safetensors").items()
