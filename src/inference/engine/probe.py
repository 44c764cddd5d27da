"""Checks at start that the engine computes what the model does, and measures what it may rely on.

The order in which a sum is taken belongs to the library of matrix products and to the machine: whether a row
has the same bits among 16 rows as among 32 cannot be known, but it can be measured, with the model itself. A
different order shows in random numbers at once.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from contract.errors import ModelError
from inference.engine.model import SlotModel
from inference.engine.slots import ATTENTION, WINDOW

logger = logging.getLogger(__name__)

_NUM_PROMPT = 9
_NUM_STEPS = 2
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of logits, as a share of the largest logit."""


def probe(model: SlotModel, name: str) -> None:
    """Compare the cache with a plain forward, and set `model.row_counts`.

    Raises:
        ModelError: they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (_NUM_PROMPT + _NUM_STEPS,), generator=generator)
    found = _run_among_others(model, tokens)
    expected = _plain(model.lm, tokens.to(model.device))
    scale = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    tolerance = _TOLERANCE.get(next(model.lm.parameters()).dtype, 1e-3)
    # Written so that NaN fails too.
    if not difference <= tolerance * max(scale, 1.0):
        raise ModelError(
            f"model.name = {name!r}: token by token over the cache of the embedded engine, logits differ by "
            f"{difference:.3g} from those of {type(model.lm).__name__} in one pass (largest logit "
            f"{scale:.3g}); the engine computes plain full attention only: take another model, or another "
            f"engine"
        )
    is_exact = _is_equal_in_all_rows(model, tokens, found, num_rows=model.num_slots, window=2 * WINDOW)
    if not is_exact:
        logger.warning(
            "on this machine the results of a sequence depend on its neighbours in the batch, in the last "
            "bits: sampling with a seed may not be reproducible"
        )
    counts = [model.num_slots]
    while counts[0] > 1:
        fewer = counts[0] // 2
        # Where nothing can be kept equal, there is no reason to compute idle rows.
        if is_exact and not _is_equal_in_all_rows(model, tokens, found, num_rows=fewer, window=WINDOW):
            break
        counts.insert(0, fewer)
    model.row_counts = tuple(counts)
    logger.debug("rows of a step: %s", counts)


def _run_among_others(model: SlotModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [1 + _NUM_STEPS, V] after the prompt and after each further token, in the last slot, while the
    others hold other tokens at other positions.
    """
    num_rows = model.num_slots
    logits = [model.prefill(tokens[:_NUM_PROMPT].tolist(), num_rows - 1)]
    for position in range(_NUM_PROMPT, len(tokens)):
        rows = (torch.arange(num_rows) * 7 + position) % model.vocab_size
        positions = torch.arange(num_rows) % WINDOW
        rows[-1], positions[-1] = tokens[position], position
        logits.append(model.decode(rows.to(model.device), positions.to(model.device), position + 1)[-1])
    return torch.stack(logits)


def _is_equal_in_all_rows(
    model: SlotModel, tokens: torch.Tensor, expected: torch.Tensor, *, num_rows: int, window: int
) -> bool:
    """Whether the same tokens in every slot give the bits of `expected` in every row."""
    model.cache.reserve(window)
    model.prefill(tokens[:_NUM_PROMPT].tolist(), 0)
    for slot in range(1, num_rows):
        model.cache.copy(0, slot, _NUM_PROMPT)
    for step, token in enumerate(tokens[_NUM_PROMPT:].to(model.device)):
        position = _NUM_PROMPT + step
        positions = torch.full((num_rows,), position, device=model.device)
        output = model.decode(token.repeat(num_rows), positions, position + 1, window)
        if not torch.equal(output, expected[step + 1].expand_as(output)):
            return False
    return True


@torch.inference_mode()
def _plain(lm: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The same logits by one forward without a cache, with the attention of torch."""
    lm.set_attn_implementation("sdpa")
    try:
        output = lm(input_ids=tokens[None], use_cache=False)
    finally:
        lm.set_attn_implementation(ATTENTION)
    return output.logits[0, _NUM_PROMPT - 1 :].float()
