"""Reward minus the mean of the group (GRPO, https://arxiv.org/abs/2402.03300)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.credit.base import are_equal


class GRPO:
    """`r - mean`, and with `normalize_std` that over the population standard deviation of the group."""

    def __init__(self, *, normalize_std: bool) -> None:
        self._normalize_std = normalize_std

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """See `Credit`."""
        if are_equal(rewards):
            return [0.0] * len(rewards)
        mean = math.fsum(rewards) / len(rewards)
        centered = [reward - mean for reward in rewards]
        if not self._normalize_std:
            return centered
        std = math.sqrt(math.fsum(value * value for value in centered) / len(centered))
        return [value / std for value in centered]
