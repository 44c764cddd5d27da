"""The model as the engine computes it: a prompt alone, or one token for every slot.

Owns the transformers model and its key-value cache. Refuses at construction what it cannot compute exactly,
and measures which numbers of rows give the same bits, see `probe`.

Legend: B rows of a step, S slots, P tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from contract.errors import ModelError
from inference.engine.slots import ATTENTION, WINDOW, SlotCache

logger = logging.getLogger(__name__)


class SlotModel:
    """A causal language model over `num_slots` slots.

    Attributes:
        lm: the transformers model, in evaluation mode, with attention `slots.ATTENTION`.
        row_counts: numbers of rows that a step may have, ascending, the last is `num_slots`; a row has the
            same bits with each of them, unless `probe` has warned that it has not.
    """

    def __init__(self, lm: Any, *, num_slots: int, max_len: int, name: str) -> None:
        """Raises:
        ModelError: the model's layers are not plain full attention up to `max_len`, or what it computes over
            the cache differs from what it computes without.
        """
        _check_layers(lm, max_len, name)
        self.lm = lm.eval().requires_grad_(False)
        self.num_slots = num_slots
        self.device = next(lm.parameters()).device
        self.vocab_size: int = lm.get_input_embeddings().num_embeddings
        self.row_counts: tuple[int, ...] = (num_slots,)
        num_layers, num_kv_heads, head_dim = _cache_shape(lm, name)
        self.cache = SlotCache(
            num_layers,
            num_slots,
            num_kv_heads,
            head_dim,
            max_len,
            next(lm.parameters()).dtype,
            self.device,
        )

    def use_device(self) -> None:
        """Make the model's GPU that of the calling thread. torch's own operations do not need it; kernels of
        others, which a model may bring, do.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @torch.inference_mode()
    def prefill(self, prompt: list[int], slot: int) -> torch.Tensor:
        """Compute a prompt into `slot`; returns the logits [V] after it, in float32.

        One prompt a forward: the bits of its keys, values and logits depend on nothing else.
        """
        # One more, for what idle rows write behind a prompt.
        self.cache.reserve(len(prompt) + 1)
        self.cache.begin_prefill(slot)
        tokens_1P = torch.tensor([prompt], device=self.device)
        positions_1P = torch.arange(len(prompt), device=self.device)[None]
        output = self.lm(
            input_ids=tokens_1P,
            position_ids=positions_1P,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[0, -1].float()

    @torch.inference_mode()
    def decode(
        self, tokens_B: torch.Tensor, positions_B: torch.Tensor, longest: int, window: int | None = None
    ) -> torch.Tensor:
        """Compute one token of each of the first B slots; returns the logits [B, V] after it, in float32.

        Args:
            tokens_B, positions_B: on the model's device; B is one of `row_counts`.
            longest: tokens of the longest sequence that counts, this token included; rows with higher
                positions get garbage.
            window: tokens read of each slot; None is the smallest that holds `longest`.
        """
        self.cache.reserve(longest)
        window = min(window or -(-longest // WINDOW) * WINDOW, self.cache.capacity)
        mask = self.cache.begin_decode(positions_B, window)
        output = self.lm(
            input_ids=tokens_B[:, None],
            position_ids=positions_B[:, None],
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1].float()


def _check_layers(lm: Any, max_len: int, name: str) -> None:
    config = lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True) and kinds == {"full_attention"}:
        window = None
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"model.name = {name!r} has layers of kind {', '.join(sorted(unknown))}; the embedded engine "
            f"computes full attention only: take another model, or another engine"
        )
    # A window that no sequence exceeds is full attention.
    if window is not None and window < max_len:
        raise ModelError(
            f"model.name = {name!r} attends to a sliding window of {window} tokens, and sequences may have "
            f"{max_len}; the embedded engine computes full attention only: set max_len to at most {window}, "
            f"or take another model"
        )
    if not getattr(lm, "_supports_attention_backend", False) or lm.config._attn_implementation != ATTENTION:
        raise ModelError(
            f"model.name = {name!r}: {type(lm).__name__} does not take the attention of another library; the "
            f"embedded engine needs that: take another model, or another engine"
        )


@torch.inference_mode()
def _cache_shape(lm: Any, name: str) -> tuple[int, int, int]:
    """Layers, key-value heads and head dimension, as the model's layers really give them."""
    from transformers import DynamicCache

    lm.set_attn_implementation("sdpa")
    try:
        cache = DynamicCache()
        tokens = torch.zeros((1, 2), dtype=torch.long, device=next(lm.parameters()).device)
        lm(input_ids=tokens, past_key_values=cache, use_cache=True)
    finally:
        lm.set_attn_implementation(ATTENTION)
    shapes: set[tuple[int, ...]] = set()
    for layer in cache.layers:
        for part in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            shapes.add(tuple(part.shape) if isinstance(part, torch.Tensor) else ())
    shape = shapes.pop() if shapes else ()
    if shapes or len(shape) != 4:
        raise ModelError(
            f"model.name = {name!r}: the layers of {type(lm).__name__} do not keep keys and values of one "
            f"shape; the embedded engine needs that: take another model, or another engine"
        )
    return len(cache.layers), shape[1], shape[3]
