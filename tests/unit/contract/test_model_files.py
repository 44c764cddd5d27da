"""Where a model's files come from, and what is said if there are none. The Hub is never asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ModelError
from contract.model_files import load_model_config, load_tokenizer, resolve_model
from trainer.config.model import ModelConfig


def resolve(name: str, **settings: Any) -> Path:
    return resolve_model(ModelConfig(name=name, **settings)).folder


def test_a_folder_is_taken_as_it_is(tiny_llama: Path) -> None:
    source = resolve_model(ModelConfig(name=str(tiny_llama)))
    assert (source.name, source.folder) == (str(tiny_llama), tiny_llama)


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing", "missing.gguf", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match=rf"model.name = '{name}': no such file or folder on this machine"):
        resolve(name)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config.json; name a Hugging Face folder or .gguf file"):
        resolve(str(tmp_path))


def test_a_version_of_something_local_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"model.revision = 'main' names a version on the Hub"):
        resolve(str(tiny_llama), revision="main")


def test_a_file_of_a_package_is_found_and_its_absence_is_said(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tinypackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model").symlink_to(tiny_llama)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert resolve("package:tinypackage/model").samefile(tiny_llama)
    with pytest.raises(ModelError, match="package 'tinypackage' holds no file 'other'"):
        resolve("package:tinypackage/other")
    for name in ("package:notinstalled/x", "package:tinypackage", "package:../x"):
        with pytest.raises(ModelError, match="is not installed"):
            resolve(name)


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


def test_a_gguf_file_is_converted_once_into_a_folder_of_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensors = write_gguf(tmp_path / "tiny.gguf")
    folder = resolve(str(tmp_path / "tiny.gguf"))
    assert folder.parent == tmp_path / "cache" / "tailrace" / "models"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    found = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)
    # The second time nothing is written; a copy of the file elsewhere is the same model.
    (folder / "config.json").touch()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes((tmp_path / "tiny.gguf").read_bytes())
    assert resolve(str(copy)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_damaged_gguf_file_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match="cannot be read as a GGUF causal language model"):
        resolve(str(tmp_path / "bad.gguf"))
    assert list((tmp_path / "cache" / "tailrace" / "models").iterdir()) == []


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-like-it"}')
    config = ModelConfig(name=str(tmp_path))
    with pytest.raises(ModelError, match=r"its configuration cannot be read: .*nothing-like-it"):
        load_model_config(config, resolve_model(config))


def test_the_chat_template_is_that_of_the_setting_a_file_or_the_tokenizer(
    tiny_llama: Path, tmp_path: Path
) -> None:
    def template(**settings: Any) -> Any:
        config = ModelConfig(name=str(tiny_llama), **settings)
        return load_tokenizer(config, resolve_model(config)).chat_template

    assert "<|im_start|>" in template()
    assert template(chat_template="{{ messages }}") == "{{ messages }}"
    (tmp_path / "own.jinja").write_text("{{ x }}")
    assert template(chat_template=str(tmp_path / "own.jinja")) == "{{ x }}"
    with pytest.raises(ModelError, match="no such file, and not a Jinja template"):
        template(chat_template="missing.jinja")


def test_a_tokenizer_that_cannot_be_loaded_is_said(tiny_llama: Path, tmp_path: Path) -> None:
    config = ModelConfig(name=str(tiny_llama), tokenizer=str(tmp_path))
    with pytest.raises(
        ModelError, match=r"(?s)the tokenizer of '.*' cannot be loaded: .*; set model.tokenizer"
    ):
        load_tokenizer(config, resolve_model(config))
