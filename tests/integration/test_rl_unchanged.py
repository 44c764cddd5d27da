"""What the embedded engine samples, the trainer's model finds as likely: both from one folder of weights."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.batch import Sample, StepBatch, build_micro_batch
from contract.packing import pack_balanced
from contract.policy import GenerateRequest, GenerateResponse, Sampling
from contract.rollout import COMPONENTS
from contract.sections import ModelFilesConfig, SamplingConfig
from inference.config import EmbeddedEngineConfig, InferenceConfig
from inference.engine.build import build_engine as build_sampler
from inference.engine.embedded import EmbeddedEngine
from orchestrator.environment import Environment, Message
from orchestrator.environment.builtin.guess_number import GuessNumber
from orchestrator.environment.builtin.sort_letters import SortLetters
from orchestrator.episode import Episode, EpisodeRunner
from orchestrator.sample import to_samples
from orchestrator.tokens import TurnRenderer
from tests.support.engine import build_engine, build_sharded, group_of_one, train
from tests.support.environments import Rounds
from trainer.config.optimizer import AdamWConfig
from trainer.config.rl import ClippedLossConfig, TrustRegionLossConfig
from trainer.objective.policy_gradient import PolicyGradient
from trainer.objective.policy_loss import TokenLoss, TokenValues, build_token_loss

_MODEL = Path(__file__).parents[2] / "configs" / "debug" / "model"
_SEQ_LEN = 448
_VOCAB_SIZE = 259
_TASKS = 4
_STEPS = 2


class _LocalSource:
    """An environment of this process as a source of episodes."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.max_turns = environment.max_turns
        self.tools = environment.tools

    async def start(self, task: Mapping[str, Any]) -> list[Message]:
        return self._environment.start(task)

    async def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> tuple[list[Message] | None, dict[str, Any]]:
        answer = self._environment.respond(task, messages, state)
        assert not inspect.isawaitable(answer)
        return answer, state

    async def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]:
        reward = self._environment.reward(task, messages, state)
        assert isinstance(reward, Mapping)
        return dict(reward)


class _LocalPolicy:
    """Draws from an engine of this process."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def generate(self, prompt: list[int], sampling: Sampling, request_id: str) -> GenerateResponse:
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason = None
        async for drawn in self._engine.draw(GenerateRequest(request_id, prompt, sampling)):
            tokens += drawn.tokens
            logprobs += drawn.logprobs
            versions += drawn.versions
            reason = drawn.finish_reason
        assert reason is not None
        return GenerateResponse(request_id, tokens, logprobs, versions, reason)


async def _sample(temperature: float) -> list[Episode]:
    """Episodes of one turn, of three with tool results between, and of guesses; all at a time."""
    engine = build_sampler(
        InferenceConfig(
            model=ModelFilesConfig(name=str(_MODEL)),
            engine=EmbeddedEngineConfig(max_batch=8),
            device="cpu",
            num_threads=1,
            max_len=_SEQ_LEN,
        )
    )
    letters = {"min_length": 3, "max_length": 3, "alphabet": "abcdefgh"}
    environments = [SortLetters(**letters), Rounds(**letters), GuessNumber(max_turns=4)]
    runner = EpisodeRunner(_LocalPolicy(engine), TurnRenderer(engine.tokenizer), _SEQ_LEN)
    sampling = SamplingConfig(temperature=temperature, max_tokens=48)
    try:
        async with asyncio.timeout(60):
            return await asyncio.gather(
                *(
                    runner.run(
                        _LocalSource(environment), environment.task(index), sampling=sampling, seed=index
                    )
                    for environment in environments
                    for index in range(_TASKS)
                )
            )
    finally:
        await engine.close()


def _batch(samples: Sequence[Sample]) -> StepBatch:
    """Packed as a run packs them."""
    (rows,) = pack_balanced([len(sample.tokens) for sample in samples], _SEQ_LEN, 1)
    parts = [
        build_micro_batch(
            [[samples[item] for item in row] for row in rows[start : start + 2]], components=COMPONENTS
        )
        for start in range(0, len(rows), 2)
    ]
    return StepBatch(parts, len(samples), 0.0)


class _Watched:
    """A loss that keeps the greatest log-ratio of any token."""

    def __init__(self, loss: TokenLoss) -> None:
        self._loss = loss
        self.num_tokens = 0
        self.greatest_log_ratio = 0.0

    def __call__(
        self, logprobs_N: torch.Tensor, sampler_logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, TokenValues]:
        self.num_tokens += len(logprobs_N)
        greatest = (logprobs_N.detach() - sampler_logprobs_N).abs().max().item()
        self.greatest_log_ratio = max(self.greatest_log_ratio, greatest)
        return self._loss(logprobs_N, sampler_logprobs_N, advantages_N)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("loss", [TrustRegionLossConfig(), ClippedLossConfig()], ids=lambda loss: loss.type)
def test_the_ratio_of_every_token_of_an_unchanged_policy_is_1(
    temperature: float, loss: TrustRegionLossConfig | ClippedLossConfig
) -> None:
    episodes = asyncio.run(_sample(temperature))
    assert {1, 3, 4} <= {episode.num_turns for episode in episodes}
    samples = [
        sample
        for index, episode in enumerate(episodes)
        for sample in to_samples(episode, (-1.0) ** index, temperature, index)
    ]
    watched = _Watched(build_token_loss(loss))
    with group_of_one() as process:
        engine = build_engine(
            build_sharded(_MODEL, process),
            process,
            optimizer=AdamWConfig(lr=0.0),
            objective=PolicyGradient(_VOCAB_SIZE, watched),
        )
        records, _ = train(engine, process, [_batch(samples)] * _STEPS)
    num_sampled = sum(episode.num_sampled for episode in episodes)
    assert watched.num_tokens == _STEPS * num_sampled == _STEPS * records[0]["tokens/rl"]
    assert watched.greatest_log_ratio < 1e-4
    for record in records:
        assert 0 <= record["mismatch_kl"] < 1e-6
        assert abs(record["ratio"] - 1) < 1e-5
        assert record["clip_fraction"] == 0
        assert record["grad_norm"] > 0
