"""Which projections are packed, how the packed layer answers in their place, and what is refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn

from contract.errors import ConfigError, ModelError
from tests.support.engine import build_sharded, rank_process, weights_of
from tests.support.ranks import run_ranks
from tests.unit.trainer.model.families import write_family
from trainer.config.model import ModelConfig
from trainer.model.fusion import fuse_projections
from trainer.parallel.layout import Region
from trainer.parallel.process import Process

BOTH = ["qkv", "gate_up"]
WIDTH, SIZES = 6, {"q_proj": 8, "k_proj": 4, "v_proj": 2}


class Attention(nn.Module):
    """Has the three projections, and nothing that a model would do with them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, SIZES["q_proj"], bias)
        self.k_proj = nn.Linear(WIDTH, SIZES["k_proj"], bias)
        self.v_proj = nn.Linear(WIDTH, SIZES["v_proj"], bias)


def fused_attention() -> tuple[Any, dict[str, nn.Linear], list[int]]:
    """A packed module with random weights, the projections that it stands for, and a list that grows with
    every product.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        owner: Any = Attention()
    fuse_projections(owner, ["qkv"])
    owner.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in owner.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    weights = owner.qkv_proj.weight.split(list(SIZES.values()))
    biases = owner.qkv_proj.bias.split(list(SIZES.values()))
    parts: dict[str, nn.Linear] = {}
    for name, weight, bias in zip(SIZES, weights, biases, strict=True):
        parts[name] = nn.Linear(WIDTH, SIZES[name])
        parts[name].load_state_dict({"weight": weight, "bias": bias})
    products: list[int] = []
    owner.qkv_proj.register_forward_hook(lambda *_: products.append(1))
    return owner, parts, products


def hidden(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("calls", "num_products"),
    [
        (["q_proj 1", "k_proj 1", "v_proj 1"], 1),
        (["v_proj 1", "q_proj 1", "k_proj 1"], 1),
        (["q_proj 1", "k_proj 1", "v_proj 1", "q_proj 1", "k_proj 1", "v_proj 1"], 2),
        (["q_proj 1", "k_proj 2", "v_proj 2"], 2),
        (["q_proj 1", "k_proj 2", "v_proj 1"], 3),
        (["q_proj 1", "q_proj 1", "k_proj 1", "v_proj 1"], 2),
    ],
)
def test_any_order_of_calls_gives_each_projection_of_its_own_input(
    calls: list[str], num_products: int
) -> None:
    owner, parts, products = fused_attention()
    inputs = {"1": hidden(1), "2": hidden(2)}
    for call in calls:
        name, which = call.split()
        torch.testing.assert_close(getattr(owner, name)(inputs[which]), parts[name](inputs[which]))
    assert len(products) == num_products


def test_an_output_that_is_changed_in_place_changes_neither_the_others_nor_gradients() -> None:
    owner, parts, _ = fused_attention()
    given = hidden(1).requires_grad_()
    query = owner.q_proj(given).clamp_(-0.1, 0.1)
    torch.testing.assert_close(owner.k_proj(given), parts["k_proj"](given))
    torch.testing.assert_close(owner.q_proj(given), parts["q_proj"](given))
    (mine,) = torch.autograd.grad(query.sum(), given)
    (expected,) = torch.autograd.grad(parts["q_proj"](given).clamp(-0.1, 0.1).sum(), given)
    torch.testing.assert_close(mine, expected)


def test_what_was_computed_without_gradients_is_not_handed_out_with_them() -> None:
    owner, _, _ = fused_attention()
    given = hidden(1)
    with torch.no_grad():
        assert not owner.q_proj(given).requires_grad
    assert owner.k_proj(given).requires_grad


def test_nothing_is_kept_once_every_part_is_taken() -> None:
    owner, _, _ = fused_attention()
    given = hidden(1)
    alive = weakref.ref(given)
    outputs = [getattr(owner, name)(given).detach().clone() for name in SIZES]
    assert len(outputs) == 3
    del given
    gc.collect()
    assert alive() is None


def bias_in_one(owner: Attention) -> None:
    owner.k_proj = nn.Linear(WIDTH, 4, bias=False)


def another_input(owner: Attention) -> None:
    owner.v_proj = nn.Linear(WIDTH + 1, 2)


def another_type(owner: Attention) -> None:
    owner.v_proj = nn.Linear(WIDTH, 2, dtype=torch.bfloat16)


def a_subclass(owner: Attention) -> None:
    owner.v_proj = type("Adapter", (nn.Linear,), {})(WIDTH, 2)


def a_missing_part(owner: Attention) -> None:
    del owner.v_proj


def a_weight_of_two_layers(owner: Attention) -> None:
    other = nn.Linear(WIDTH, 2)
    other.weight = owner.v_proj.weight
    owner.register_module("other", other)


def a_name_in_use(owner: Attention) -> None:
    owner.register_module("qkv_proj", nn.Identity())


@pytest.mark.parametrize(
    "change",
    [
        bias_in_one, another_input, another_type, a_subclass, a_missing_part, a_weight_of_two_layers,
        a_name_in_use,
    ],
)  # fmt: skip
def test_projections_that_one_layer_cannot_stand_for_are_left_alone(change: Any) -> None:
    with torch.device("meta"):
        model = nn.ModuleList([Attention(), Attention()])
        change(model[1])
    before = [name for name, _ in model[1].named_parameters()]
    packed = fuse_projections(model, ["qkv"])
    assert packed.keys() == {"0.qkv_proj.weight", "0.qkv_proj.bias"}
    assert [name for name, _ in model[1].named_parameters()] == before


def test_a_packed_parameter_is_described_by_its_rows() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"attention": Attention(bias=False)})
    regions = (
        Region("attention.q_proj.weight", 0, 8),
        Region("attention.k_proj.weight", 8, 12),
        Region("attention.v_proj.weight", 12, 14),
    )
    assert fuse_projections(model, ["qkv"]) == {"attention.qkv_proj.weight": regions}
    assert [name for name, _ in model.named_parameters()] == ["attention.qkv_proj.weight"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_are_packed_from_the_files_and_keep_their_names_in_checkpoints(
    family: str, tmp_path: Path, process: Process
) -> None:
    folder = write_family(tmp_path, family)
    files = load_file(folder / "model.safetensors")
    model = build_sharded(folder, process, fusions=BOTH)
    weights = weights_of(model)
    for layer in (0, 1):
        place = f"model.layers.{layer}"
        packed = {
            f"{place}.self_attn.qkv_proj": [f"{place}.self_attn.{part}_proj" for part in "qkv"],
            f"{place}.mlp.gate_up_proj": [f"{place}.mlp.{part}_proj" for part in ("gate", "up")],
        }
        for name, parts in packed.items():
            expected = torch.cat([files[f"{part}.weight"] for part in parts])
            np.testing.assert_array_equal(weights.pop(f"{name}.weight"), expected.numpy())
            if f"{parts[0]}.bias" in files:
                bias = torch.cat([files[f"{part}.bias"] for part in parts])
                np.testing.assert_array_equal(weights.pop(f"{name}.bias"), bias.numpy())
    assert not any(part in name for name in weights for part in ("q_proj", "k_proj", "gate_proj", "up_proj"))
    plain = build_sharded(folder, process).logical_state()
    logical = model.logical_state()
    assert logical.keys() == plain.keys() == files.keys()
    for name, item in logical.items():
        assert torch.equal(item.pieces[0].tensor, files[name]), name


def all_weights(folder: str, random: bool, family_has_gate: bool) -> list[dict[str, Any]]:
    """Whole weights without fusion and with, for both shardings; logical ones by cutting the whole rows."""
    process = rank_process()
    init: dict[str, Any] = {"init": "random", "seed": 4} if random else {}
    found = [weights_of(build_sharded(folder, process, **init))]
    for on_dim1 in (False, True):
        fusions = BOTH if family_has_gate else ["qkv"]
        model = build_sharded(folder, process, fusions=fusions, shard_fused_on_dim1=on_dim1, **init)
        whole = weights_of(model)
        for name in model.packed:
            rows = whole.pop(name)
            for region in model.packed[name]:
                whole[region.name] = rows[region.start : region.stop]
        found.append(whole)
    return found


@pytest.mark.parametrize(
    ("family", "random"), [("qwen2", False), ("qwen2", True), ("qwen3_moe", False), ("qwen3_moe", True)]
)
def test_random_and_converted_weights_are_those_of_the_model_without_fusion(
    family: str, random: bool, tmp_path: Path
) -> None:
    folder = write_family(tmp_path, family)
    for plain, *fused in run_ranks(all_weights, 2, str(folder), random, family == "qwen2"):
        for weights in fused:
            assert weights.keys() == plain.keys()
            for name, item in weights.items():
                np.testing.assert_array_equal(item, plain[name], err_msg=name)


@pytest.mark.parametrize(
    ("family", "fusion", "message"),
    [
        ("phi3", "qkv", r"'qkv', but Phi3ForCausalLM has no module with q_proj, k_proj, v_proj as plain"),
        ("qwen3_moe", "gate_up", r"'gate_up', but Qwen3MoeForCausalLM has .*; remove 'gate_up' from"),
    ],
)
def test_a_fusion_that_the_model_does_not_have_is_refused(
    family: str, fusion: str, message: str, tmp_path: Path, process: Process
) -> None:
    with pytest.raises(ModelError, match=message):
        build_sharded(write_family(tmp_path, family), process, fusions=[fusion])


def test_contradictory_settings_are_refused_when_they_are_read() -> None:
    with pytest.raises(ValidationError, match="names a fusion twice; name each once"):
        ModelConfig(name="x", fusions=["qkv", "qkv"])
    with pytest.raises(
        ValidationError, match=r"but model\.fusions is empty; set model\.fusions to \['qkv'\]"
    ):
        ModelConfig(name="x", shard_fused_on_dim1=True)


def pieces_on_rank(folder: str) -> list[dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]]:
    """Offsets and shapes of what this rank holds of q, k and v of the first layer, in both shardings."""
    process, found = rank_process(), []
    for on_dim1 in (False, True):
        state = build_sharded(folder, process, fusions=["qkv"], shard_fused_on_dim1=on_dim1).logical_state()
        found.append(
            {
                f"{part} {kind}": [
                    (piece.offsets, tuple(piece.tensor.shape))
                    for piece in state[f"model.layers.0.self_attn.{part}_proj.{kind}"].pieces
                ]
                for part in "qkv"
                for kind in ("weight", "bias")
            }
        )
    return found


def test_a_rank_holds_some_rows_of_all_features_or_all_rows_of_some_features(tmp_path: Path) -> None:
    # 32 rows of q, 8 of k and 8 of v, of 32 features: by rows the first of two ranks ends inside q.
    folder = write_family(tmp_path, "qwen2", {"num_key_value_heads": 1})
    first, second = run_ranks(pieces_on_rank, 2, str(folder))
    biases = {"q bias": [((0,), (24,))], "k bias": [], "v bias": []}
    other_biases = {"q bias": [((24,), (8,))], "k bias": [((0,), (8,))], "v bias": [((0,), (8,))]}
    q, k, v = "q weight", "k weight", "v weight"
    by_rows, by_features = first
    assert by_rows == {q: [((0, 0), (24, 32))], k: [], v: [], **biases}
    half = {q: [((0, 0), (32, 16))], k: [((0, 0), (8, 16))], v: [((0, 0), (8, 16))]}
    assert by_features == {**half, **biases}
    by_rows, by_features = second
    assert by_rows == {
        q: [((24, 0), (8, 32))], k: [((0, 0), (8, 32))], v: [((0, 0), (8, 32))], **other_biases
    }  # fmt: skip
    other_half = {name: [((0, 16), shape)] for name, [(_, shape)] in half.items()}
    assert by_features == {**other_half, **other_biases}


def refusal_on_rank(folder: str) -> str:
    try:
        build_sharded(folder, rank_process(), fusions=["qkv"], shard_fused_on_dim1=True)
    except ConfigError as error:
        return str(error)
    return "built"


def test_input_features_that_the_shards_do_not_divide_are_refused_on_every_rank(tiny_llama: Path) -> None:
    for message in run_ranks(refusal_on_rank, 3, str(tiny_llama)):
        assert "cuts the 32 input features of a fused projection into 3 shards" in message
        assert "set it to false, or choose deployment.num_processes" in message


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_blocks_compile_once_for_all_layers_in_one_graph_with_one_product_per_fusion(
    checkpointing: str, tmp_path: Path, process: Process
) -> None:
    folder = write_family(tmp_path, "qwen2", {"num_hidden_layers": 3})
    settings: dict[str, Any] = {"attention": "sdpa", "activation_checkpointing": checkpointing}
    model = build_sharded(folder, process, fusions=BOTH, **settings)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    for block in model.blocks():
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    tokens, positions = torch.arange(3, 9), torch.arange(6)
    for _ in range(2):
        loss = model(tokens, positions, {}, lambda hidden, head: head(hidden).logsumexp(-1).sum())
        loss.backward()
    # qkv, o, gate_up, down
    assert graphs == [4]
