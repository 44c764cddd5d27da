"""The credit assignment that the configuration asks for."""

from __future__ import annotations

from orchestrator.config import AlgorithmConfig, GRPOConfig
from orchestrator.credit.base import Credit
from orchestrator.credit.grpo import GRPO
from orchestrator.credit.rloo import RLOO


def build_credit(config: AlgorithmConfig) -> Credit:
    """One object per kind of `algorithm`."""
    if isinstance(config, GRPOConfig):
        return GRPO(normalize_std=config.normalize_std)
    return RLOO()
