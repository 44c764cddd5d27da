"""What becomes of a group: who counts, and whether there is anything to learn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from contract.batch import Sample
from orchestrator.credit.grpo import GRPO
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.episode import Episode, SampledTokens
from orchestrator.group import JudgedGroup, check_episode, derive_seed, has_signal, judge
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
