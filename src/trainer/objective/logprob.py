"""Log-probabilities of given tokens without materialising the logits of a whole row.

Legend: N selected tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from trainer.objective.base import Head

LOGITS_BYTES = 256 * 2**20
"""Most bytes of float32 logits that exist at a time. Below it nothing is computed twice."""


def token_logprobs(
    hidden_ND: torch.Tensor,
    head: Head,
    targets_N: torch.Tensor,
    vocab_size: int,
    *,
    logits_bytes: int = LOGITS_BYTES,
) -> torch.Tensor:
    """[N] float32 log-probabilities of `targets_N` under softmax(head(hidden_ND)).

    The tokens are cut into chunks whose logits take at most `logits_bytes`. With more than one chunk the
    logits of each are computed again in backward, so that memory does not grow with N.
    """
    chunk_len = max(1, logits_bytes // (4 * vocab_size))
    if len(hidden_ND) <= chunk_len:
        return _chunk_logprobs(hidden_ND, targets_N, head)
    chunks = zip(hidden_ND.split(chunk_len), targets_N.split(chunk_len), strict=True)
    parts = [
        checkpoint(_chunk_logprobs, hidden, targets, head, use_reentrant=False) for hidden, targets in chunks
    ]
    return torch.cat([part for part in parts if part is not None])


def _chunk_logprobs(hidden_ND: torch.Tensor, targets_N: torch.Tensor, head: Head) -> torch.Tensor:
    return -cross_entropy(head(hidden_ND).float(), targets_N, reduction="none")
