"""A tiny model as a GGUF file, and a conversion that never ends by itself."""

from __future__ import annotations

from pathlib import Path

import torch

_ENDLESS_TORCH = """
import time
from pathlib import Path

(Path(__file__).parent / "begun").touch()
time.sleep(600)
"""


def write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A llama of one block with float32 weights; its tensors by their Hugging Face names."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    tokens = ["<unk>", "<s>", "</s>", *"abcdefghijk"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[1] * 11])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {
        "token_embd": ("model.embed_tokens", (14, 16)),
        "output": ("lm_head", (14, 16)),
        "output_norm": ("model.norm", (16,)),
        "blk.0.attn_norm": ("model.layers.0.input_layernorm", (16,)),
        "blk.0.ffn_norm": ("model.layers.0.post_attention_layernorm", (16,)),
        "blk.0.attn_q": ("", (16, 16)),
        "blk.0.attn_k": ("", (16, 16)),
        "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", (16, 16)),
        "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", (16, 16)),
        "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", (32, 16)),
        "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", (32, 16)),
        "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", (16, 32)),
    }
    generator, known = torch.Generator().manual_seed(0), {}
    for name, (own_name, shape) in shapes.items():
        tensor = torch.randn(shape, generator=generator)
        writer.add_tensor(f"{name}.weight", tensor.numpy())
        if own_name:  # query and key are stored in another order
            known[f"{own_name}.weight"] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return known


def write_endless_conversion(folder: Path) -> tuple[dict[str, str], Path]:
    """Write a `torch` that holds whoever imports it; returns the environment in which it is found, and the
    file that appears when a conversion has got there.
    """
    folder.mkdir()
    (folder / "torch.py").write_text(_ENDLESS_TORCH)
    return {"PYTHONPATH": str(folder)}, folder / "begun"
