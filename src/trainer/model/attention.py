"""Attention over packed documents, registered with transformers under the name `varlen`.

Legend: H query heads, K key/value heads, T tokens of the packed row, E head size.

Queries of a document see the keys of the same document up to their own position (optionally within a sliding
window). On CUDA this is one variable-length kernel; elsewhere scaled-dot-product attention runs document by
document, which costs the sum of squared document lengths and not the square of the row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from contract.errors import ModelError

ATTENTION_NAME = "tailrace_varlen"


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Boundaries of the documents in a row: document d is `bounds[d]:bounds[d + 1]`.

    An object and not a tuple, so that torch.compile hands it through without guarding on its values.

    Attributes:
        cu_seqlens: [D + 1] int32 on the device.
        bounds: the same on the host.
    """

    cu_seqlens: torch.Tensor
    bounds: tuple[int, ...]

    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each document."""
        return list(zip(self.bounds, self.bounds[1:], strict=False))


def lay_out(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    """Documents given as token ids, end to end: their tokens [T], positions [T] and boundaries."""
    bounds = (0, *itertools.accumulate(len(row) for row in rows))
    tokens = torch.tensor([token for row in rows for token in row], device=device)
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows])
    return tokens, positions, Documents(torch.tensor(bounds, dtype=torch.int32, device=device), bounds)


# What a model may pass that this attention computes or that does not change the result of training.
_HARMLESS = {"position_ids", "use_cache", "cache_position", "is_causal", "position_embeddings"}


@torch.compiler.disable
def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tailrace_documents: Documents | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document; the signature is that of transformers' attention functions.

    Args:
        query: [1, H, T, E].
        key: [1, K, T, E].
        value: [1, K, T, E].
        attention_mask: must be None; document boundaries take its place.
        scaling: factor of the scores; None is 1 / sqrt(E).
        dropout: dropout of the attention weights.
        sliding_window: a query sees this many keys, its own included; None sees the whole document.
        softcap: bound of the scores, `softcap * tanh(score / softcap)`; None has no bound.
        tailrace_documents: document boundaries, handed through by the model.

    Returns:
        [1, T, H, E] and None for the attention weights, which are never materialised.

    Raises:
        ModelError: the model asks for something this attention does not compute (sinks, biases, a mask).
    """
    if tailrace_documents is None:
        raise ModelError(
            f"{type(module).__name__} does not hand document boundaries to its attention; set "
            f"model.attention = 'sdpa'"
        )
    unknown = [
        name
        for name, item in kwargs.items()
        if item is not None and item is not False and name not in _HARMLESS
    ]
    if attention_mask is not None or unknown or getattr(module, "is_causal", True) is False:
        raise ModelError(
            f"{type(module).__name__} needs {', '.join(unknown) or 'a mask of its own'}, which "
            f"model.attention = 'varlen' "
            "does not compute; set model.attention = 'sdpa' or 'eager'"
        )
    if _has_kernel(query) and softcap is None and dropout == 0.0:
        return _varlen_kernel(query, key, value, tailrace_documents, scaling, sliding_window), None
    outputs = []
    for start, end in tailrace_documents.spans():
        document = (query[:, :, start:end], key[:, :, start:end], value[:, :, start:end])
        outputs.append(_document_attention(*document, scaling, dropout, sliding_window, softcap))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _has_kernel(query: torch.Tensor) -> bool:
    """Whether torch's variable-length kernel takes these queries."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256


def _document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[1, H, L, E] of one document of L tokens."""
    length = query.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if window is None and softcap is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    distance = torch.arange(length, device=query.device)
    distance = distance[:, None] - distance[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=dropout, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible, float("-inf"))
    weights = torch.nn.functional.dropout(
        scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype), dropout
    )
    return weights @ value


def _varlen_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """[1, T, H, E] through torch's variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(end - start for start, end in documents.spans())
    cu_seqlens = documents.cu_seqlens
    left = -1 if sliding_window is None else sliding_window - 1
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    output = varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest,
        scale=scaling, window_size=(left, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(output, torch.Tensor)
    return output.unsqueeze(0)


def register_attention() -> None:
    """Make `varlen` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, varlen_attention)
