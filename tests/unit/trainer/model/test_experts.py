"""Slices of fused experts compared with what `from_pretrained` converts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.model.families import write_family
from trainer.model.experts import ExpertReader, MergeRule, merge_rules
from trainer.model.weights import SafetensorsReader, TensorReader

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "glm4_moe": {
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 1},
}


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("family", MIXTURES)
def test_whole_tensors_and_slices_are_those_of_the_converted_model(family: str, tmp_path: Path) -> None:
    model = load(write_family(tmp_path / family, family, MIXTURES[family]))
    state = model.state_dict()
    files = SafetensorsReader(tmp_path / family)
    reader = ExpertReader(files, merge_rules(model), state)
    merged = sorted(set(state) - files.names())
    assert merged and set(state) <= reader.names()
    for name, tensor in state.items():
        assert reader.shape(name) == tuple(tensor.shape), name
        whole = tuple(slice(0, size) for size in tensor.shape)
        assert torch.equal(reader.read(name, whole), tensor), name
    for name in merged:
        rows = state[name].shape[1]
        # The cut goes through the border between the joined matrices, where there is one.
        for first, last in ((0, 1), (rows // 2 - 3, rows // 2 + 2), (rows - 2, rows)):
            cut = (slice(1, 3), slice(first, last), slice(2, 9))
            assert torch.equal(reader.read(name, cut), state[name][cut]), (name, cut)


def test_a_tensor_is_merged_only_if_every_source_has_the_same_experts() -> None:
    rule = MergeRule("experts.both", ("experts.*.a", "experts.*.b"))
    tensors = {f"x.experts.{index}.{name}": torch.ones(2, 3) for index in range(2) for name in "ab"}
    whole = ExpertReader(TensorReader(tensors), [rule], ["x.experts.both"])
    assert whole.shape("x.experts.both") == (2, 4, 3)
    del tensors["x.experts.1.b"]
    assert "x.experts.both" not in ExpertReader(TensorReader(tensors), [rule], ["x.experts.both"]).names()


def test_a_tensor_that_the_files_hold_whole_is_read_from_there() -> None:
    rule = MergeRule("experts.both", ("experts.*.a",))
    tensors = {"x.experts.both": torch.full((1, 2), 7.0), "x.experts.0.a": torch.zeros(2)}
    reader = ExpertReader(TensorReader(tensors), [rule], ["x.experts.both"])
    assert reader.read("x.experts.both", (slice(0, 1), slice(0, 2))).tolist() == [[7.0, 7.0]]
