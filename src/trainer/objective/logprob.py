"""Log-probabilities of given tokens, and entropies, without materialising the logits of a whole row.

Legend: N selected tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from trainer.objective.base import Head

LOGITS_BYTES = 256 * 2**20
"""Most bytes of float32 logits that exist at a time. Below it nothing is computed twice."""

_T = TypeVar("_T")


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
    parts = _by_chunks(_chunk_logprobs, (hidden_ND, targets_N), head, chunk_len)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def token_statistics(
    hidden_ND: torch.Tensor,
    head: Head,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    vocab_size: int,
    *,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets_N` and entropies, both under softmax(head(hidden_ND) / temperature).

    Chunked like `token_logprobs`.

    Args:
        temperatures_N: [N] positive.

    Returns:
        [N] float32 log-probabilities, and [N] float32 entropies in nats, which carry no gradient.
    """
    # The divided logits, and the softmax that the entropy needs, stand beside the logits.
    chunk_len = max(1, logits_bytes // (3 * 4 * vocab_size))
    parts = _by_chunks(_chunk_statistics, (hidden_ND, targets_N, temperatures_N), head, chunk_len)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _by_chunks(
    function: Callable[..., _T], tensors: tuple[torch.Tensor, ...], head: Head, chunk_len: int
) -> list[_T]:
    """`function(*tensors, head)` by chunks of at most `chunk_len`; several are computed again in backward."""
    if len(tensors[0]) <= chunk_len:
        return [function(*tensors, head)]
    chunks = zip(*(tensor.split(chunk_len) for tensor in tensors), strict=True)
    # Nothing here is drawn at random, and to keep the state of the generators takes time.
    run = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    parts = [run(*chunk, head) for chunk in chunks]
    return [part for part in parts if part is not None]


def _chunk_logprobs(hidden_ND: torch.Tensor, targets_N: torch.Tensor, head: Head) -> torch.Tensor:
    return -cross_entropy(head(hidden_ND).float(), targets_N, reduction="none")


def _chunk_statistics(
    hidden_ND: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_NV = head(hidden_ND).float() / temperatures_N[:, None]
    logprobs_N = -cross_entropy(logits_NV, targets_N, reduction="none")
    with torch.no_grad():
        log_total_N = logits_NV.logsumexp(-1)
        entropies_N = log_total_N - (logits_NV.softmax(-1) * logits_NV).sum(-1)
    return logprobs_N, entropies_N
