"""The objective of RL: policy gradient on sampled tokens, cross-entropy, and KL to a reference.

Legend: T tokens of a row, N selected tokens, D hidden size.

Which tokens belong to which component, and with what weight, comes with the sample; the algorithm that chose
advantages and weights is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from contract.errors import ChannelError
from contract.rollout import COMPONENTS
from trainer.objective.base import DeviceBatch, Head
from trainer.objective.logprob import token_logprobs, token_statistics
from trainer.objective.policy_loss import MAX_LOG_RATIO, TokenLoss, TokenValues


class PolicyGradient:
    """Sum of three components, each sum_t w_t * loss_t / global count of tokens with w_t != 0.

    `rl`: `token_loss` of the log-probability at the sampler's temperature. `ce`: -log p(token). `ref_kl`: the
    estimator exp(d) - 1 - d, d = log(reference / policy), of the KL divergence from the policy to the
    reference (k3, http://joschu.net/blog/kl-approx.html).

    Args:
        vocab_size: columns of the logits.
        token_loss: see `policy_loss`.
    """

    def __init__(self, vocab_size: int, token_loss: TokenLoss) -> None:
        self._vocab_size = vocab_size
        self._token_loss = token_loss

    @property
    def components(self) -> tuple[str, ...]:
        """See `Objective`."""
        return COMPONENTS

    def __call__(
        self, hidden_TD: torch.Tensor, head: Head, batch: DeviceBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `Objective`. Reports `loss`, its parts `loss/<component>`, and means over `rl` tokens:
        `entropy` (nats), `mismatch_kl` (the same estimator of the KL divergence from the sampler to the
        policy, from the log-probabilities of the sampled tokens), `ratio` and what the loss adds.
        """
        losses = {
            "ce": self._cross_entropy(hidden_TD, head, batch, denominators["ce"]),
            "ref_kl": self._reference_kl(hidden_TD, head, batch, denominators["ref_kl"]),
        }
        losses["rl"], values = self._policy_gradient(hidden_TD, head, batch, denominators["rl"])
        loss = losses["rl"] + losses["ce"] + losses["ref_kl"]
        reported = {f"loss/{name}": losses[name].detach() for name in COMPONENTS}
        means = {name: value.sum() / denominators["rl"] for name, value in values.items()}
        return loss, {"loss": loss.detach(), **reported, **means}

    def _policy_gradient(
        self, hidden_TD: torch.Tensor, head: Head, batch: DeviceBatch, denominator: float
    ) -> tuple[torch.Tensor, TokenValues]:
        # Without any token this still goes through the head: backward is collective, and every rank must
        # report the same names.
        chosen, weights_N = _select(batch, "rl")
        logprobs_N, entropies_N = token_statistics(
            hidden_TD[chosen], head, batch.targets[chosen], _temperatures(batch, chosen), self._vocab_size
        )
        sampler_logprobs_N = _stream(batch, "logprobs", chosen)
        loss_N, values = self._token_loss(
            logprobs_N, sampler_logprobs_N, _stream(batch, "advantages", chosen)
        )
        with torch.no_grad():
            # In float64: the estimator is a difference of nearly equal numbers.
            log_ratio_N = (logprobs_N.double() - sampler_logprobs_N.double()).clamp(max=MAX_LOG_RATIO)
            common = {
                "entropy": entropies_N,
                "mismatch_kl": (torch.expm1(log_ratio_N) - log_ratio_N).float(),
                "ratio": log_ratio_N.exp().float(),
            }
        own = {name: value.detach().float() for name, value in values.items()}
        return (loss_N * weights_N).sum() / denominator, {**common, **own}

    def _cross_entropy(
        self, hidden_TD: torch.Tensor, head: Head, batch: DeviceBatch, denominator: float
    ) -> torch.Tensor:
        chosen, weights_N = _select(batch, "ce")
        if len(chosen) == 0:
            return hidden_TD.new_zeros((), dtype=torch.float32)
        logprobs_N = token_logprobs(hidden_TD[chosen], head, batch.targets[chosen], self._vocab_size)
        return -(logprobs_N * weights_N).sum() / denominator

    def _reference_kl(
        self, hidden_TD: torch.Tensor, head: Head, batch: DeviceBatch, denominator: float
    ) -> torch.Tensor:
        chosen, weights_N = _select(batch, "ref_kl")
        if len(chosen) == 0:
            return hidden_TD.new_zeros((), dtype=torch.float32)
        logprobs_N, _ = token_statistics(
            hidden_TD[chosen], head, batch.targets[chosen], _temperatures(batch, chosen), self._vocab_size
        )
        difference_N = (_stream(batch, "ref_logprobs", chosen) - logprobs_N).clamp(max=MAX_LOG_RATIO)
        return ((torch.expm1(difference_N) - difference_N) * weights_N).sum() / denominator


def _select(batch: DeviceBatch, component: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] positions that carry weight in `component`, and their weights."""
    weights_T = batch.weights.get(component)
    if weights_T is None:
        return batch.targets.new_zeros(0), torch.zeros(0, device=batch.targets.device)
    chosen = weights_T.nonzero().squeeze(1)
    return chosen, weights_T[chosen]


def _stream(batch: DeviceBatch, name: str, chosen: torch.Tensor) -> torch.Tensor:
    stream_T = batch.streams.get(name)
    if stream_T is None:
        if len(chosen):
            raise ChannelError(f"samples came without the stream {name!r}, which their loss weights need")
        return torch.zeros(0, device=chosen.device)
    return stream_T[chosen]


def _temperatures(batch: DeviceBatch, chosen: torch.Tensor) -> torch.Tensor:
    if "temperatures" not in batch.streams:
        return torch.ones(len(chosen), device=chosen.device)
    return _stream(batch, "temperatures", chosen)
