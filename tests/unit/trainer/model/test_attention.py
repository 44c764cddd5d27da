"""Attention inside documents, against the definition written out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from contract.errors import ModelError
from trainer.model import attention
from trainer.model.attention import Documents, lay_out

BOUNDS = (0, 5, 6, 13)


# The decorator that keeps it out of torch.compile hides its signature.
varlen_attention: Any = attention.varlen_attention


class NotCausal(torch.nn.Module):
    is_causal = False


def documents() -> Documents:
    return Documents(torch.tensor(BOUNDS, dtype=torch.int32), BOUNDS)


def heads(seed: int, count: int) -> torch.Tensor:
    return torch.randn(1, count, BOUNDS[-1], 8, generator=torch.Generator().manual_seed(seed)) * 2


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int, cap: float | None
) -> torch.Tensor:
    """[1, T, H, E], one query at a time."""
    output = torch.zeros(1, query.shape[2], query.shape[1], query.shape[3])
    for start, end in itertools.pairwise(BOUNDS):
        for head in range(query.shape[1]):
            shared = head * key.shape[1] // query.shape[1]
            for position in range(start, end):
                first = max(start, position - window + 1)
                scores = key[0, shared, first : position + 1] @ query[0, head, position] * scale
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                output[0, position, head] = scores.softmax(0) @ value[0, shared, first : position + 1]
    return output


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_values_are_those_of_the_definition(
    kv_heads: int, window: int | None, cap: float | None, scaling: float | None
) -> None:
    query, key, value = heads(0, 4), heads(1, kv_heads), heads(2, kv_heads)
    output, weights = varlen_attention(
        torch.nn.Identity(), query, key, value, None,
        scaling=scaling, sliding_window=window, softcap=cap, tailrace_documents=documents(),
    )  # fmt: skip
    expected = by_definition(query, key, value, scaling or 8**-0.5, window or 99, cap)
    assert weights is None
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "mask", "message"),
    [
        ({}, None, "Identity does not hand document boundaries to its attention"),
        ({"tailrace_documents": documents()}, torch.ones(1), "Identity needs a mask of its own"),
        ({"tailrace_documents": documents(), "s_aux": torch.ones(4)}, None, "Identity needs s_aux"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    arguments: dict[str, Any], mask: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        varlen_attention(torch.nn.Identity(), heads(0, 2), heads(1, 2), heads(2, 2), mask, **arguments)


def test_attention_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ModelError, match="needs a mask of its own"):
        varlen_attention(
            NotCausal(), heads(0, 2), heads(1, 2), heads(2, 2), None, tailrace_documents=documents()
        )


def test_documents_are_laid_end_to_end_with_positions_from_zero() -> None:
    tokens, positions, laid = lay_out([[7, 8, 9], [5]], torch.device("cpu"))
    assert tokens.tolist() == [7, 8, 9, 5] and positions.tolist() == [0, 1, 2, 0]
    assert laid.bounds == (0, 3, 4) and laid.cu_seqlens.tolist() == [0, 3, 4]
    assert laid.spans() == [(0, 3), (3, 4)]
