"""Cross-entropy on the tokens with a `ce` weight: the loss of SFT."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer.objective.base import DeviceBatch, Head
from trainer.objective.logprob import token_logprobs


class CrossEntropy:
    """Weighted negative log-likelihood: sum_t w_t * -log p(target_t) / global count of tokens with w_t !=
    0.
    """

    @property
    def components(self) -> tuple[str, ...]:
        """See `Objective`."""
        return ("ce",)

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(
        self, hidden_TD: torch.Tensor, head: Head, batch: DeviceBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `Objective`. Reports `loss`, the row's share of the mean loss over trainable tokens."""
        weights = batch.weights.get("ce")
        # Tokens without weight are selected away before the head: their logits would cost as much as the
        # others'.
        chosen = None if weights is None else weights.nonzero().squeeze(1)
        if weights is None or chosen is None or len(chosen) == 0:
            # Backward is collective: a row without loss still sends (zero) gradients through every block and
            # the head.
            loss = head(hidden_TD[:0]).float().sum()
            return loss, {"loss": loss.detach()}
        logprobs = token_logprobs(hidden_TD[chosen], head, batch.targets[chosen], self._vocab_size)
        loss = -(logprobs * weights[chosen]).sum() / denominators["ce"]
        return loss, {"loss": loss.detach()}
