"""Tiny models of several architectures, whose scales and caps are strong enough to be seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # Scores and logits of the usual random weights are so small that a cap or a leak hardly moves them.
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {
        "sliding_window": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 4,
    },
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
    },
    "cohere": {"logit_scale": 0.25},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    },
}


def write_family(
    folder: Path, family: str, settings: Mapping[str, Any] | None = None, *, buffers: float | None = None
) -> Path:
    """Write a random model of `family` without a tokenizer.

    Args:
        settings: fields of the architecture's configuration, beside or instead of those above.
        buffers: value of every persistent buffer; None leaves them as they are.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_SIZES, **FAMILIES.get(family, {}), **(settings or {})})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    persistent = model.state_dict().keys()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if buffers is not None and name in persistent:
                buffer.fill_(buffers)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith("bias"):
                # Norms of ones hide a norm that is not applied.
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    model.save_pretrained(folder)
    return folder
