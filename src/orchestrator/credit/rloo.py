"""Reward minus the mean of the others of the group (RLOO, https://arxiv.org/abs/2402.14740)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.credit.base import are_equal


class RLOO:
    """`r_i` minus the mean of all `r_j` with `j != i`."""

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """See `Credit`."""
        if are_equal(rewards):
            return [0.0] * len(rewards)
        total = math.fsum(rewards)
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
