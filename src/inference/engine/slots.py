"""The key-value cache: a fixed number of slots, one sequence each, of whatever length.

Owns the memory and the attention that reads it. Rows of a decode step are slots: row i of every tensor is the
token of slot i, also where slot i is idle and its row is computed for nothing, so that the shapes, and with
them the order of every sum, do not depend on how many sequences run.

Invariants: what lies in the cache is finite, as a masked value is multiplied by zero and NaN would survive
that; the window that a step reads is a multiple of `WINDOW`, with which the attention of torch gives the same
bits for a sequence however long the window is (see `probe`). Which slot belongs to whom is the scheduler's
concern.

Legend: B rows of a step, S slots, L capacity in tokens, W window, H heads, K key-value heads, G = H / K,
P tokens of a prompt, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from contract.errors import ModelError, PolicyServerError

ATTENTION = "tailrace_slots"
"""Name of the attention under which a model reads `SlotCache`."""
WINDOW = 64


class SlotCache(Cache):
    """Keys and values of all layers; grows as sequences do, and never shrinks."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self._max_len = max_len
        self._prefill_slot: int | None = None
        self._rows = torch.zeros(0, dtype=torch.long, device=device)
        self._positions = torch.zeros(0, dtype=torch.long, device=device)
        self._window = WINDOW
        # Of each layer [2, S, K, L, D].
        self._data = [
            torch.zeros((2, num_slots, num_kv_heads, WINDOW, head_dim), dtype=dtype, device=device)
            for _ in range(num_layers)
        ]

    @property
    def capacity(self) -> int:
        """Tokens that fit in each slot."""
        return self._data[0].shape[3]

    def num_bytes(self, num_tokens: int) -> int:
        """Memory with room for so many tokens in each slot."""
        data = self._data[0]
        per_token = len(self._data) * data.element_size() * (data.numel() // data.shape[3])
        return -(-num_tokens // WINDOW) * WINDOW * per_token

    def reserve(self, num_tokens: int) -> None:
        """Make room for so many tokens in each slot.

        Raises:
            PolicyServerError: the memory of the GPU is full.
        """
        if num_tokens <= self.capacity:
            return
        # Half as much again, so that a sequence that grows token by token is not copied for each window.
        wanted = max(num_tokens, min(self.capacity * 3 // 2, self._max_len))
        capacity = -(-wanted // WINDOW) * WINDOW
        # Layer by layer: there is no room for two whole caches on a GPU that is well used.
        for layer, data in enumerate(self._data):
            try:
                grown = data.new_zeros((*data.shape[:3], capacity, data.shape[4]))
            except torch.OutOfMemoryError as error:
                raise PolicyServerError(
                    f"the GPU has no memory left for {self.num_slots} sequences of {num_tokens} tokens; they "
                    f"need {self.num_bytes(num_tokens) / 2**30:.1f} GiB of key-value cache; lower "
                    f"inference.engine.max_batch or the longest sequence (seq_len of a run, max_len)"
                ) from error
            grown[:, :, :, : data.shape[3]] = data
            self._data[layer] = grown
        if self._data[0].is_cuda:
            # What the smaller cache had is of no use here, but may be to a trainer on the same GPU.
            torch.cuda.empty_cache()

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` of one slot to another."""
        for data in self._data:
            data[:, target, :, :num_tokens] = data[:, source, :, :num_tokens]

    def clean(self) -> None:
        """Replace what is not finite."""
        for data in self._data:
            data.nan_to_num_(0.0, 0.0, 0.0)

    def begin_prefill(self, slot: int) -> None:
        """The next forward is one whole prompt of `slot`."""
        self._prefill_slot = slot

    def begin_decode(self, positions_B: torch.Tensor, window: int) -> torch.Tensor:
        """The next forward is one token of each of the first B slots, at `positions_B`, and reads `window`
        tokens of each. Returns the mask [B, 1, 1, W] to pass to the model.
        """
        self._prefill_slot = None
        self._positions = positions_B
        self._window = window
        if len(self._rows) != len(positions_B):
            self._rows = torch.arange(len(positions_B), device=positions_B.device)
        columns_W = torch.arange(window, device=positions_B.device)
        mask_BW = torch.zeros(
            (len(positions_B), window), dtype=self._data[0].dtype, device=positions_B.device
        ).masked_fill_(columns_W[None] > positions_B[:, None], float("-inf"))
        return mask_BW[:, None, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each layer with [1, K, P, D] of a prompt, or [B, K, 1, D] of a step; returns what it
        attends to: the prompt itself, or [B, K, W, D].
        """
        keys, values = self._data[layer_idx]
        if self._prefill_slot is not None:
            num_tokens = key_states.shape[2]
            keys[self._prefill_slot, :, :num_tokens] = key_states[0]
            values[self._prefill_slot, :, :num_tokens] = value_states[0]
            return key_states, value_states
        num_rows = len(self._rows)
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        return keys[:num_rows, :, : self._window], values[:num_rows, :, : self._window]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Of no one sequence: positions are always passed to the model."""
        return 0


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over `SlotCache`, in the form that transformers asks of an attention.

    Args:
        query: [1, H, P, D] of a prompt, or [B, H, 1, D] of a step.
        key, value: what `SlotCache.update` returned.
        attention_mask: that of `SlotCache.begin_decode`; None for a prompt.

    Returns:
        [1, P, H, D] or [B, 1, H, D], and None in place of the weights.

    Raises:
        ModelError: the layer asks for more than plain softmax attention.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} uses {', '.join(unknown)}; the embedded engine computes plain full "
            f"attention only: take another model, or another engine"
        )
    if attention_mask is None:
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=query.shape[2] > 1,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).contiguous(), None
    # The heads that share keys become queries of one head: no copy of the keys for each of them.
    num_rows, num_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    query_BKGD = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output_BKGD = scaled_dot_product_attention(
        query_BKGD, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output_BKGD.reshape(num_rows, 1, num_heads, value.shape[3]), None


AttentionInterface.register(ATTENTION, slot_attention)
