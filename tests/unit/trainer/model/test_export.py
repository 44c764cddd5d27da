"""Exported folders, loaded by transformers alone and compared with the model they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from contract.errors import ModelError
from tests.support.tiny_model import write_tiny_model
from trainer.model.export import export_weights, find_export_problems


def load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def trained_weights(source: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Parameters after a change that no file holds, and the model itself."""
    model, _ = load(source)
    model = model.float()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1.0 + 0.25 * (index + 1))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None]).logits


@pytest.mark.parametrize("tie", [True, False])
def test_an_export_computes_what_the_trained_model_computes_with_tied_and_untied_heads(
    tmp_path: Path, tie: bool
) -> None:
    source = write_tiny_model(tmp_path / "source", tie=tie)
    weights, model = trained_weights(source)
    _, tokenizer = load(source)
    export_weights(weights, source, tmp_path / "out", tokenizer=tokenizer)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tie
    loaded, again = load(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert again.encode("hello") == tokenizer.encode("hello")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


def test_a_tied_head_that_is_given_twice_is_written_once(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", tie=True)
    weights, _ = trained_weights(source)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    export_weights(weights, source, tmp_path / "out", tokenizer=load(source)[1])
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_fused_experts_are_stored_under_the_names_of_the_published_format(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    source = write_tiny_model(tmp_path / "tokenizer")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "moe_intermediate_size": 8,
        "num_experts": 3,
        "vocab_size": 259,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1}
    config = AutoConfig.for_model(
        "qwen3_moe", num_experts_per_tok=2, max_position_embeddings=64, **sizes, **heads
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.save_pretrained(tmp_path / "moe")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    export_weights(weights, tmp_path / "moe", tmp_path / "out", tokenizer=load(source)[1])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    fused = weights["model.layers.0.mlp.experts.gate_up_proj"]
    expert = "model.layers.0.mlp.experts.2"
    assert torch.equal(stored[f"{expert}.gate_proj.weight"], fused[2, :8])
    assert torch.equal(stored[f"{expert}.up_proj.weight"], fused[2, 8:])
    loaded, _ = load(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model.eval()))


@pytest.mark.parametrize(
    ("setting", "of_source", "expected"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float32", torch.float32),
        ("float16", "bfloat16", torch.float16),
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_the_type_is_what_is_asked_for_or_that_of_the_source(
    tmp_path: Path, setting: str, of_source: str, expected: torch.dtype
) -> None:
    source = write_tiny_model(tmp_path / "source")
    weights, _ = trained_weights(source)
    change_json(source / "config.json", dtype=of_source)
    export_weights(weights, source, tmp_path / "out", tokenizer=load(source)[1], dtype=setting)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {expected}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(expected).removeprefix(
        "torch."
    )
    assert torch.equal(stored["model.norm.weight"], weights["model.norm.weight"].to(expected))


def test_a_split_export_has_an_index_that_names_exactly_its_files(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", tie=False)
    weights, model = trained_weights(source)
    target = tmp_path / "out"
    export_weights(weights, source, target, tokenizer=load(source)[1], max_shard_size="30KB")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = {path.name for path in target.glob("*.safetensors")}
    assert len(files) > 2
    assert set(index["weight_map"].values()) == files
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert torch.equal(logits(load(target)[0]), logits(model))
    assert find_export_problems(target) == []
    change_json(target / "model.safetensors.index.json", metadata={"total_size": 5})
    (target / sorted(files)[-1]).unlink()
    problems = find_export_problems(target)
    assert "and files differ" in problems[0] and "says 5 bytes" in problems[1]


def test_generation_ends_where_the_source_the_tokenizer_or_the_template_ends(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    change_json(source / "config.json", use_cache=False)
    # A temperature without do_sample, as some published models have it.
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7], "temperature": 0.5, "use_cache": False})
    )
    _, tokenizer = load(source)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = (
        "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|im_end|>{% endfor %}"
    )
    weights, _ = trained_weights(source)
    export_weights(weights, source, tmp_path / "out", tokenizer=tokenizer)
    model, again = load(tmp_path / "out")
    assert model.generation_config.eos_token_id == [7, 0, 2]
    assert (model.generation_config.use_cache, model.config.use_cache) == (True, True)
    messages = [{"role": "user", "content": "hi"}]
    assert again.apply_chat_template(messages, tokenize=False) == "[user]hi<|im_end|>"


def test_weights_of_another_model_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    weights, _ = trained_weights(source)
    tokenizer = load(source)[1]
    norm = weights.pop("model.norm.weight")
    with pytest.raises(ModelError, match=r"1 are missing \(model.norm.weight\)"):
        export_weights(weights, source, tmp_path / "out", tokenizer=tokenizer)
    with pytest.raises(ModelError, match=r"1 do not belong to it \(other\)"):
        export_weights(
            {**weights, "model.norm.weight": norm, "other": norm},
            source,
            tmp_path / "out",
            tokenizer=tokenizer,
        )
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(1,\)"):
        export_weights(
            {**weights, "model.norm.weight": norm[:1]}, source, tmp_path / "out", tokenizer=tokenizer
        )
    assert not (tmp_path / "out").exists()


def test_an_earlier_export_is_replaced_and_any_other_folder_is_left_alone(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    weights, model = trained_weights(source)
    tokenizer = load(source)[1]
    export_weights(
        {name: torch.zeros_like(w) for name, w in weights.items()},
        source,
        tmp_path / "out",
        tokenizer=tokenizer,
    )
    export_weights(weights, source, tmp_path / "out", tokenizer=tokenizer)
    assert torch.equal(logits(load(tmp_path / "out")[0]), logits(model))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    with pytest.raises(ModelError, match="no earlier export"):
        export_weights(weights, source, tmp_path / "mine", tokenizer=tokenizer)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
