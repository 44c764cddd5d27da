"""Two questions asked of a model before it is trained, whose wrong answers would otherwise go unnoticed.

1. Are the logits that the objective gets those of the model itself? (Architectures scale or cap them in many
ways.) 2. Do packed documents stay apart? (Convolutions and recurrent layers mix neighbours, whatever the
attention does.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from contract.errors import ModelError
from trainer.model.attention import lay_out
from trainer.model.causal_lm import CausalLM

_FIRST, _SECOND, _CHANGED = (3, 5, 7, 11, 13), (4, 6, 8, 10), (9, 2, 12, 1, 14)


def check_model(model: CausalLM, device: torch.device, *, is_varlen: bool, is_low_precision: bool) -> None:
    """Run a few tokens through the sharded model; collective.

    Raises:
        ModelError: one of the questions is answered with no.
    """
    # In float32 only rounding in another order is allowed; the leaks and scales this looks for are far
    # larger.
    tolerance = 5e-2 if is_low_precision else 1e-6
    with model.inference():
        packed = _hidden(model, [_FIRST, _SECOND], device, is_varlen)
        changed = _hidden(model, [_CHANGED, _SECOND], device, is_varlen)
        logits, own_logits = _both_logits(model, device, is_varlen)
    name = type(model.lm).__name__
    second = slice(len(_FIRST), len(_FIRST) + len(_SECOND))
    if _distance(packed[second], changed[second]) > tolerance:
        raise ModelError(
            f"{name} lets packed documents influence each other (a change in one moved the next), which "
            f"would train on "
            "wrong contexts; it cannot be trained here"
        )
    if _distance(logits, own_logits) > max(tolerance, 1e-4):
        raise ModelError(
            f"the logits of {name} are not a plain projection of its hidden states; it cannot be trained here"
        )


def _both_logits(model: CausalLM, device: torch.device, is_varlen: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits from the head function, and from the whole model, which runs inside so that its head is
    gathered.
    """
    tokens, positions, arguments = _inputs([_SECOND], device, is_varlen)

    def function(hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        whole = {"input_ids": tokens[None], "position_ids": positions[None], "attention_mask": None}
        return head(hidden), model.lm(**whole, use_cache=False, **arguments).logits[0]

    return _run(model, [_SECOND], device, is_varlen, function)


def _hidden(
    model: CausalLM, rows: Sequence[Sequence[int]], device: torch.device, is_varlen: bool
) -> torch.Tensor:
    return _run(model, rows, device, is_varlen, lambda hidden, head: hidden)


def _run(
    model: CausalLM,
    rows: Sequence[Sequence[int]],
    device: torch.device,
    is_varlen: bool,
    function: Callable[..., Any],
) -> Any:
    tokens, positions, arguments = _inputs(rows, device, is_varlen)
    return model(tokens, positions, arguments, function)


def _inputs(
    rows: Sequence[Sequence[int]], device: torch.device, is_varlen: bool
) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, Any]]:
    tokens, positions, documents = lay_out(rows, device)
    return tokens, positions, {"tailrace_documents": documents} if is_varlen else {}


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference as a share of the largest value."""
    left, right = left.float(), right.float()
    return float((left - right).abs().max() / left.abs().max().clamp(min=1e-12))
