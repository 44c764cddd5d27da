"""Sharded reading compared with `from_pretrained`, bit for bit, at several world sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import ModelError
from tests.support.engine import Array, build_sharded, rank_process, weights_of, whole
from tests.support.ranks import run_ranks
from tests.unit.trainer.model.families import write_family
from trainer.model.weights import TensorReader, open_weights
from trainer.parallel.process import Process


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_bfloat16_files(folder: Path, source: Path) -> Path:
    """The model of `source` in bfloat16, in several files with an index."""
    load(source).to(torch.bfloat16).save_pretrained(folder, max_shard_size="16KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    # No dimension here is a multiple of 4, and k_proj has 2 rows for 4 ranks.
    odd = {"tie_word_embeddings": False, "vocab_size": 131, "intermediate_size": 50, "hidden_size": 30}
    few = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 2}
    experts = {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    return {
        "tied": tiny_llama,
        "untied, odd sizes": write_family(root / "odd", "llama", {**odd, **few}),
        "bfloat16 in several files": write_bfloat16_files(root / "half", tiny_llama),
        # Every expert has tensors of its own on disk, and the router has a persistent buffer.
        "single experts": write_family(
            root / "moe", "glm4_moe", {**experts, "topk_group": 1, "first_k_dense_replace": 1}, buffers=0.25
        ),
        # Modules have other names on disk as well: transformers converts a full copy.
        "converted": write_family(root / "mixtral", "mixtral", {"num_local_experts": 3}),
        "several rotary tables": write_family(root / "gemma3", "gemma3_text"),
        "scaled rotary table": write_family(
            root / "llama3",
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
    }


def read_all(folders: dict[str, str]) -> dict[str, tuple[dict[str, Array], dict[str, Array]]]:
    return read_on(rank_process(), folders)


def read_on(
    process: Process, folders: dict[str, str]
) -> dict[str, tuple[dict[str, Array], dict[str, Array]]]:
    """Of every model the parameters under their Hugging Face names, and all buffers."""
    found = {}
    for name, folder in folders.items():
        model = build_sharded(folder, process)
        assert all(item.dtype == torch.float32 for item in model.parameters())
        found[name] = (
            weights_of(model),
            {key.removeprefix("lm."): whole(item) for key, item in model.named_buffers()},
        )
    return found


def assert_equal(left: dict[str, Array], right: dict[str, Array]) -> None:
    assert left.keys() == right.keys()
    for name, item in left.items():
        np.testing.assert_array_equal(item, right[name], err_msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sharded_reading_gives_the_weights_and_buffers_of_from_pretrained(
    world_size: int, folders: dict[str, Path], process: Process
) -> None:
    places = {name: str(folder) for name, folder in folders.items()}
    ranks = [read_on(process, places)] if world_size == 1 else run_ranks(read_all, world_size, places)
    for name, folder in folders.items():
        model = load(folder)
        parameters = {key: item.detach().numpy() for key, item in model.named_parameters()}
        buffers = {key: item.numpy() for key, item in model.named_buffers()}
        assert any("inv_freq" in key for key in buffers)
        if name == "single experts":
            bias = [item for key, item in buffers.items() if "e_score_correction_bias" in key]
            assert bias and all((item == 0.25).all() for item in bias)
        for of_rank in ranks:
            assert_equal(of_rank[name][0], parameters)
            assert_equal(of_rank[name][1], buffers)


def random_weights(folder: str) -> tuple[dict[str, Array], dict[str, Array]]:
    process = rank_process()
    return tuple(weights_of(build_sharded(folder, process, init="random", seed=seed)) for seed in (5, 6))  # pyright: ignore[reportReturnType]


def test_random_weights_are_those_of_the_seed_at_every_world_size(tiny_llama: Path, process: Process) -> None:
    before = torch.random.get_rng_state()
    alone = weights_of(build_sharded(tiny_llama, process, init="random", seed=5))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.std(alone["model.embed_tokens.weight"]) == pytest.approx(0.02, rel=0.1)
    for first, second in run_ranks(random_weights, 2, str(tiny_llama)):
        assert_equal(first, alone)
        assert (first["model.embed_tokens.weight"] != second["model.embed_tokens.weight"]).any()


def test_bfloat16_computes_on_float32_weights(tiny_llama: Path, process: Process) -> None:
    model = build_sharded(tiny_llama, process, compute_dtype=torch.bfloat16, attention="sdpa")
    exact = {key: item.detach().numpy() for key, item in load(tiny_llama).named_parameters()}
    assert_equal(weights_of(model), exact)
    tokens = torch.arange(3, 9)
    with model.inference():
        hidden, logits = model(tokens, torch.arange(6), {}, lambda hidden, head: (hidden, head(hidden)))
    assert (hidden.dtype, logits.dtype) == (torch.bfloat16, torch.bfloat16)
    assert all(item.dtype == torch.float32 for item in model.parameters())


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_a_missing_file_of_the_index_is_named(
    folders: dict[str, Path], tmp_path: Path, process: Process
) -> None:
    broken = copy_of(folders["bfloat16 in several files"], tmp_path / "broken")
    gone = sorted(broken.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=rf"holds no complete safetensors weights \(missing: {gone.name}\)"):
        build_sharded(broken, process)


def test_a_folder_without_weights_is_refused(
    folders: dict[str, Path], tmp_path: Path, process: Process
) -> None:
    broken = copy_of(folders["tied"], tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no complete safetensors weights"):
        build_sharded(broken, process)


def test_a_damaged_file_is_named(folders: dict[str, Path], tmp_path: Path, process: Process) -> None:
    broken = copy_of(folders["tied"], tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        build_sharded(broken, process)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_named(
    folders: dict[str, Path], tmp_path: Path, process: Process, text: str
) -> None:
    broken = copy_of(folders["bfloat16 in several files"], tmp_path / "broken")
    (broken / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        build_sharded(broken, process)


def test_a_weight_of_another_shape_is_named(
    folders: dict[str, Path], tmp_path: Path, process: Process
) -> None:
    broken = copy_of(folders["tied"], tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 60}))
    with pytest.raises(ModelError, match=r"mlp\.\w+\.weight has shape \((64, 32|32, 64)\) in the files"):
        build_sharded(broken, process)


def test_weights_that_no_file_holds_are_counted(
    folders: dict[str, Path], tmp_path: Path, process: Process
) -> None:
    broken = copy_of(folders["tied"], tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"weights are missing from the files, e\.g\. model\.layers\.2\."):
        build_sharded(broken, process)


def test_files_are_converted_only_if_a_name_is_missing(folders: dict[str, Path]) -> None:
    def never() -> dict[str, torch.Tensor]:
        raise AssertionError("the files have every name")

    for name in ("tied", "single experts", "converted"):
        model = load(folders[name])
        needed = {key for key, _ in model.named_parameters()}
        if name == "converted":
            one = {"other.weight": torch.ones(2)}
            reader = open_weights(folders[name], needed, model, lambda one=one: one)
            assert isinstance(reader, TensorReader) and reader.names() == {"other.weight"}
        else:
            assert open_weights(folders[name], needed, model, never).names() >= needed
