"""What becomes of a group: who counts, and whether there is anything to learn."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from contract.batch import Sample
from contract.sections import SamplingConfig
from orchestrator.credit.grpo import GRPO
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.episode import Episode, SampledTokens
from orchestrator.group import JudgedGroup, check_episode, derive_seed, has_signal, judge, run_episode
from orchestrator.plan import Draw
from tests.support.rollouts import make_episode


def _judge(rewards: list[float | None], *, normalize_std: bool = False) -> JudgedGroup:
    outcomes = [
        EpisodeFailed("environment", f"episode {i}") if reward is None else make_episode(reward, [3 + i])
        for i, reward in enumerate(rewards)
    ]
    credit = GRPO(normalize_std=normalize_std)
    return judge(Draw(5, 0, 2, 0), "a", outcomes, credit=credit, temperature=1.0)


@pytest.mark.parametrize("normalize_std", [False, True])
def test_a_group_with_one_valid_episode_has_failed_and_nothing_is_nan(normalize_std: bool) -> None:
    group = _judge([None, None, None, 1.0], normalize_std=normalize_std)
    assert (group.outcome, group.episodes, group.oldest_version) == ("failed", (), None)
    assert [stat.reward for stat in group.stats] == [1.0]
    assert group.failure is not None and group.failure.message == "episode 0"


def test_a_failed_episode_is_in_neither_loss_nor_baseline() -> None:
    group = _judge([1.0, None, 0.0, 0.5])
    assert [(one.index, one.advantage) for one in group.episodes] == [(0, 0.5), (2, -0.5), (3, 0.0)]
    assert group.outcome == "signal" and group.oldest_version == 3
    # One id per episode of the run, whatever failed.
    assert [one.samples[0].sample_id for one in group.episodes] == [20, 22, 23]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_a_group_of_equal_rewards_has_no_signal(reward: float) -> None:
    group = _judge([reward] * 3)
    assert (group.outcome, group.episodes, group.num_sampled) == ("no_signal", (), 3)


def _sample(rl: list[float], advantages: list[float], **others: list[float]) -> Sample:
    weights = {name: np.array(values, dtype=np.float32) for name, values in {"rl": rl, **others}.items()}
    return Sample(np.arange(len(rl)), weights, 0, {"advantages": np.array(advantages, dtype=np.float32)})


def test_a_weight_in_another_loss_component_is_a_signal() -> None:
    assert not has_signal(_sample([0, 1, 1], [0, 0, 0]))
    assert has_signal(_sample([0, 1, 1], [0, 0, 0.5]))
    assert has_signal(_sample([0, 1, 1], [0, 0, 0], ce=[0, 0, 1]))
    assert not has_signal(_sample([0, 1, 1], [0, 0, 0], ref_kl=[0, 0, 0]))
    # An advantage where nothing was sampled, and a weight on the first token, move nothing.
    assert not has_signal(_sample([1, 0, 1], [2, 2, 0]))


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_fails_the_episode(reward: float) -> None:
    with pytest.raises(EpisodeFailed, match="finite") as error:
        check_episode(make_episode(reward))
    assert error.value.kind == "environment"


def test_an_episode_without_a_sampled_token_does_not_count() -> None:
    with pytest.raises(EpisodeFailed, match="no token"):
        check_episode(Episode([SampledTokens([1], [False], [0.0], [-1])], [], {"reward": 1.0}, 1, "stop"))
    check_episode(make_episode(1.0))


def test_seeds_depend_on_every_part_and_its_place() -> None:
    parts = [(a, b, c) for a in range(6) for b in range(6) for c in range(-1, 5)]
    seeds = {derive_seed(*part) for part in parts}
    assert len(seeds) == len(parts) and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)


@pytest.mark.parametrize(
    ("kinds", "is_outage"),
    [
        (["server", "worker", None], True),
        (["server", "environment", None], True),  # with the server's there would have been two
        (["server", "environment", "timeout"], False),
        (["environment", "prompt too long", None], False),
        (["server", None, None], False),  # it has not failed
    ],
)
def test_a_group_fails_by_outages_if_it_would_not_have_without_them(
    kinds: list[str | None], is_outage: bool
) -> None:
    outcomes = [
        make_episode(float(i)) if kind is None else EpisodeFailed(kind, "") for i, kind in enumerate(kinds)
    ]
    credit = GRPO(normalize_std=False)
    assert judge(Draw(0, 0, 0, 0), "a", outcomes, credit=credit, temperature=1.0).is_outage == is_outage


class _Runner:
    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    async def run(self, source: Any, task: Any, *, sampling: SamplingConfig, seed: int) -> Episode:
        if self._error is not None:
            raise self._error
        await asyncio.sleep(3600)
        return make_episode(1.0)


def _run_episode(error: BaseException | None) -> Episode:
    episode = run_episode(_Runner(error), None, None, sampling=SamplingConfig(), seed=0, timeout_seconds=0.05)
    return asyncio.run(asyncio.wait_for(episode, 20))


def test_an_episode_that_takes_too_long_fails() -> None:
    with pytest.raises(EpisodeFailed, match=r"rollout\.episode_timeout_seconds = 0\.05") as error:
        _run_episode(None)
    assert error.value.kind == "timeout"


def test_another_error_of_time_is_not_taken_for_the_limit_of_the_episode() -> None:
    with pytest.raises(TimeoutError, match="a defect"):
        _run_episode(TimeoutError("a defect"))
