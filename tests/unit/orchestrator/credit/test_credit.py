"""Advantages against numpy, and never anything but a number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestrator.config import GRPOConfig, RLOOConfig
from orchestrator.credit.base import Credit
from orchestrator.credit.build import build_credit

REWARDS = [0.0, 1.0, 0.25, 0.25, -3.0]
ALL = (GRPOConfig(), GRPOConfig(normalize_std=True), RLOOConfig())


def test_grpo_subtracts_the_mean_and_may_divide_by_the_deviation() -> None:
    centered = np.array(REWARDS) - np.mean(REWARDS)
    assert build_credit(GRPOConfig()).advantages(REWARDS) == pytest.approx(centered)
    scaled = build_credit(GRPOConfig(normalize_std=True)).advantages(REWARDS)
    assert scaled == pytest.approx(centered / np.std(REWARDS))


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    expected = [reward - np.mean(REWARDS[:i] + REWARDS[i + 1 :]) for i, reward in enumerate(REWARDS)]
    assert build_credit(RLOOConfig()).advantages(REWARDS) == pytest.approx(expected)


@pytest.mark.parametrize("credit", [build_credit(config) for config in ALL])
@pytest.mark.parametrize(
    # The mean of three times 0.1 is not 0.1, and 0.1 + 0.2 is not 0.3: rounding is no signal.
    "rewards",
    [[1.0], [0.0] * 4, [0.1] * 3, [0.1 + 0.2, 0.3], [1e12 + 0.1, 1e12 + 0.2]],
)
def test_equal_rewards_give_exactly_zero(credit: Credit, rewards: list[float]) -> None:
    assert credit.advantages(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("credit", [build_credit(config) for config in ALL])
def test_small_differences_are_a_signal(credit: Credit) -> None:
    values = credit.advantages([0.5, 0.5001, 0.5])
    assert all(map(math.isfinite, values)) and values[1] > 0 > values[0]
