"""Losses of sampled tokens: what one token adds, given its log-probabilities and its advantage.

Legend: N sampled tokens.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from contract.errors import ConfigError
from contract.rollout import COMPONENTS
from trainer.config.rl import ClippedLossConfig, CustomLossConfig, LossConfig, TrustRegionLossConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded to this before `exp`: beyond it every loss here has masked the token, or is flat."""

RESERVED = frozenset({"loss", *(f"loss/{name}" for name in COMPONENTS), "entropy", "mismatch_kl", "ratio"})
"""What is reported of every loss; the run's own `loss` decides whether an update is finite."""

TokenValues = dict[str, torch.Tensor]
TokenLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, TokenValues]]
"""`(logprobs_N, sampler_logprobs_N, advantages_N)` to the loss of each token [N], and [N] values whose means
over all sampled tokens are logged, by name. N may be 0, and the names must not depend on the values.
Gradients flow through `logprobs_N` alone."""


def bounded_log_ratio(logprobs_N: torch.Tensor, sampler_logprobs_N: torch.Tensor) -> torch.Tensor:
    """log(policy / sampler) of each token, within +-MAX_LOG_RATIO."""
    return (logprobs_N - sampler_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def build_token_loss(config: LossConfig) -> TokenLoss:
    """The loss that `config` names.

    Raises:
        ConfigError: a custom function cannot be imported.
    """
    if isinstance(config, TrustRegionLossConfig):
        return _trust_region(config)
    if isinstance(config, ClippedLossConfig):
        return _clipped(config)
    return _custom(config)


def _trust_region(config: TrustRegionLossConfig) -> TokenLoss:
    """-ratio * advantage where ratio_min <= ratio <= ratio_max, plus log_ratio_penalty * log(ratio)^2."""

    def loss(
        logprobs_N: torch.Tensor, sampler_logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, TokenValues]:
        log_ratio_N = bounded_log_ratio(logprobs_N, sampler_logprobs_N)
        ratio_N = log_ratio_N.exp()
        inside_N = (ratio_N.detach() >= config.ratio_min) & (ratio_N.detach() <= config.ratio_max)
        gain_N = torch.where(inside_N, ratio_N * advantages_N, 0.0)
        return config.log_ratio_penalty * log_ratio_N**2 - gain_N, {"clip_fraction": (~inside_N).float()}

    return loss


def _clipped(config: ClippedLossConfig) -> TokenLoss:
    """-min(ratio * advantage, clip(ratio) * advantage): PPO, https://arxiv.org/abs/1707.06347, eq. 7."""

    def loss(
        logprobs_N: torch.Tensor, sampler_logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, TokenValues]:
        ratio_N = bounded_log_ratio(logprobs_N, sampler_logprobs_N).exp()
        clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
        gain_N, clipped_gain_N = ratio_N * advantages_N, clipped_N * advantages_N
        return -torch.minimum(gain_N, clipped_gain_N), {"clip_fraction": (clipped_gain_N < gain_N).float()}

    return loss


def _custom(config: CustomLossConfig) -> TokenLoss:
    module, _, name = config.function.partition(":")
    if os.getcwd() not in sys.path:  # a module beside the configuration, as for environments
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"loss.function = {config.function!r} cannot be imported: {error}; write "
            f"`package.module:function`, importable from the folder in which the run was started"
        ) from error

    def loss(*arguments: torch.Tensor) -> tuple[torch.Tensor, TokenValues]:
        returned = function(*arguments)
        _check_returned(config.function, returned, len(arguments[0]))
        return returned

    return loss


def _check_returned(function: str, returned: Any, count: int) -> None:
    """Raises `ConfigError` where a custom loss did not return what a `TokenLoss` must."""
    name, advice = f"loss.function = {function!r} returned", "; see docs/rl.md"
    is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)
    if not is_pair:
        raise ConfigError(f"{name} no pair of the tokens' losses and a dict of values to log{advice}")
    losses, values = returned
    for key, value in {"loss": losses, **{f"value {key!r}": value for key, value in values.items()}}.items():
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != (count,):
            raise ConfigError(
                f"{name} a {key} that is not a tensor of one number for each of the {count} tokens{advice}"
            )
    if taken := sorted(RESERVED & values.keys()):
        raise ConfigError(
            f"{name} a value by the name {', '.join(taken)}, which is that of another metric; rename it"
        )
