"""State on the host between updates: the same numbers as state beside the parameters, in fixed memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.engine import group_of_one, rank_process
from tests.support.ranks import run_ranks
from tests.unit.trainer.optimizer.cases import (
    CHUNK_BYTES,
    CONFIGS,
    SHAPES,
    Mode,
    as_model,
    assert_same_pieces,
    build,
    build_over,
    copy_of,
    copy_pieces,
    local_weights,
    parameters,
    random_tensor,
    reload,
    update,
)
from trainer.config.model import Offload
from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig
from trainer.optimizer.factory import build_optimizer
from trainer.optimizer.offload.state import OffloadedStateOptimizer
from trainer.optimizer.resident import ResidentOptimizer
from trainer.parallel.device import Device
from trainer.parallel.layout import LogicalTensor, ModelParameter, Placement, Region

LATE = "embed.weight"
"""Has its first gradient at the third update, and none at the fifth."""

Pieces = dict[str, dict[tuple[int, ...], torch.Tensor]]


def train(config: OptimizerConfig, mode: Mode, chunk_bytes: int) -> tuple[dict[str, Any], Pieces, Any]:
    """Weights, state and options after six updates, two of them clipped."""
    named = parameters()
    optimizer = build(config, named, mode, chunk_bytes=chunk_bytes)
    for step in range(6):
        for index, (name, shape) in enumerate(SHAPES.items()):
            if name != LATE or step in (2, 3, 5):
                named[name].grad = random_tensor(1000 * step + index, shape)
        norm = optimizer.grad_norm()
        optimizer.step(1.0 / (step + 1), min(1.0, 6.0 / norm))
        optimizer.zero_grad()
        assert all(item.grad is None for item in named.values())
    return local_weights(named), copy_pieces(optimizer.tensors()), optimizer.values()


def compare_with_resident() -> list[Any]:
    """On each rank: options of every optimizer, once weights and state were found the same in both modes."""
    options = []
    for config in CONFIGS:
        weights, state, values = train(config, "none", CHUNK_BYTES)
        for chunk_bytes in (8, CHUNK_BYTES, 1 << 20):
            own_weights, own_state, own_values = train(config, "optimizer", chunk_bytes)
            for name, item in weights.items():
                torch.testing.assert_close(own_weights[name], item, rtol=0.0, atol=1e-6, msg=name)
            assert_same_pieces(own_state, state, tolerance=1e-6)
            assert own_values == values
        options.append(values)
    return options


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_state_and_options_equal_those_of_resident_state_wherever_parameters_are_cut(
    world_size: int,
) -> None:
    results = run_ranks(compare_with_resident, world_size)
    # Also the group that is empty on the second rank has its options there.
    assert all(options == results[0] for options in results)
    assert "no_decay" in results[0][0]["groups"]


# On three ranks the third holds nothing of the first matrix, and all hold the second.
UNEVEN = {"layers.0.first": (4, 3), "layers.0.second": (6, 3)}


def train_uneven(mode: Mode) -> tuple[dict[str, Any], Pieces]:
    named = {name: nn.Parameter(random_tensor(i, shape)) for i, (name, shape) in enumerate(UNEVEN.items())}
    optimizer = build(MuonConfig(lr=0.1), named, mode, chunk_bytes=8)
    for step in range(3):
        for index, (name, shape) in enumerate(UNEVEN.items()):
            named[name].grad = random_tensor(1000 * step + index, shape)
        optimizer.step(1.0, 1.0)
        optimizer.zero_grad()
    return local_weights(named), copy_pieces(optimizer.tensors())


def compare_uneven() -> int:
    weights, state = train_uneven("none")
    own_weights, own_state = train_uneven("optimizer")
    for name, item in weights.items():
        torch.testing.assert_close(own_weights[name], item, rtol=0.0, atol=1e-6, msg=name)
    assert_same_pieces(own_state, state, tolerance=1e-6)
    return weights["layers.0.first"].numel()


def test_ranks_update_whole_matrices_in_the_same_order_whatever_they_hold_of_them() -> None:
    assert run_ranks(compare_uneven, 3) == [6, 6, 0]


def addresses(tensors: dict[str, LogicalTensor]) -> dict[str, list[int]]:
    return {
        name: [piece.tensor.data_ptr() for piece in item.pieces]
        for name, item in tensors.items()
        if item.residence == "host"
    }


def test_state_is_updated_and_loaded_in_the_same_host_memory() -> None:
    named = parameters()
    optimizer = build(AdamWConfig(), named, "optimizer")
    update(named, optimizer, range(1))
    before = optimizer.tensors()
    values = copy_pieces(before)
    assert {item.residence for name, item in before.items() if not name.endswith(".step")} == {"host"}
    update(named, optimizer, range(1, 3))
    assert addresses(optimizer.tensors()) == addresses(before)
    moved = copy_pieces(before)
    assert all(not torch.equal(moved[name][0, 0], values[name][0, 0]) for name in ("embed.weight.exp_avg",))
    assert (
        addresses(optimizer.tensors_to_load(before.keys()))["embed.weight.exp_avg"]
        == (addresses(before)["embed.weight.exp_avg"])
    )


def test_what_was_handed_out_for_a_save_keeps_its_counts_and_names() -> None:
    named = parameters()
    optimizer = build(AdamWConfig(), named, "optimizer")
    named["layers.0.norm.weight"].grad = torch.ones(1)
    optimizer.step(1.0, 1.0)
    handed_out = optimizer.tensors()
    optimizer.zero_grad()
    update(named, optimizer, range(3))
    assert set(handed_out) == {f"layers.0.norm.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert handed_out["layers.0.norm.weight.step"].pieces[0].tensor.item() == 1.0
    assert optimizer.tensors()["layers.0.norm.weight.step"].pieces[0].tensor.item() == 4.0


def test_a_discarded_gradient_changes_nothing() -> None:
    named = parameters()
    optimizer = build(AdamWConfig(), named, "optimizer")
    update(named, optimizer, range(2))
    weights, state = local_weights(named), copy_pieces(optimizer.tensors())
    for item in named.values():
        item.grad = torch.full_like(item, torch.nan)
    assert not optimizer.grad_norm() < float("inf")
    optimizer.zero_grad()
    assert_same_pieces(copy_pieces(optimizer.tensors()), state)
    assert all(torch.equal(item, weights[name]) for name, item in named.items())


def carry_through(config: OptimizerConfig, modes: Sequence[Mode]) -> tuple[dict[str, Any], Pieces]:
    """Two updates in each of `modes`, with a checkpoint from one to the next."""
    named = parameters()
    optimizer = build(config, named, modes[0])
    for index, mode in enumerate(modes):
        if index:
            named = {name: nn.Parameter(copy_of(item)) for name, item in named.items()}
            optimizer = reload(config, named, optimizer, mode)
        update(named, optimizer, range(2 * index, 2 * index + 2))
    return local_weights(named), copy_pieces(optimizer.tensors())


def compare_changes_of_mode() -> None:
    for config in CONFIGS:
        straight, straight_state = carry_through(config, ["optimizer", "optimizer", "optimizer"])
        weights, state = carry_through(config, ["none", "optimizer", "none"])
        again, again_state = carry_through(config, ["optimizer", "none", "optimizer"])
        for name, item in straight.items():
            torch.testing.assert_close(weights[name], item, rtol=0.0, atol=1e-6, msg=name)
            torch.testing.assert_close(again[name], item, rtol=0.0, atol=1e-6, msg=name)
        assert_same_pieces(state, straight_state, tolerance=1e-6)
        assert_same_pieces(again_state, straight_state, tolerance=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_goes_on_when_offload_is_turned_on_or_off_at_a_resume(world_size: int) -> None:
    run_ranks(compare_changes_of_mode, world_size)


@dataclass(frozen=True, slots=True)
class CountingDevice(Device):
    """A CPU that knows how much of its memory is taken, and the most that ever was."""

    taken: list[int] = field(default_factory=lambda: [0, 0])

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        self.taken[0] += num_bytes
        self.taken[1] = max(self.taken)
        # The array lives as long as any tensor over its memory.
        memory = np.empty(num_bytes, np.uint8)
        weakref.finalize(memory, self._give_back, num_bytes)
        return torch.from_numpy(memory).view(dtype).view(*shape)

    def _give_back(self, num_bytes: int) -> None:
        self.taken[0] -= num_bytes


@pytest.mark.parametrize("chunk_bytes", [8, CHUNK_BYTES, 100])
def test_the_device_never_holds_more_than_three_chunks_and_none_between_updates(chunk_bytes: int) -> None:
    device = CountingDevice(torch.device("cpu"))
    named = parameters()
    optimizer = build(AdamWConfig(), named, "optimizer", device=device, chunk_bytes=chunk_bytes)
    update(named, optimizer, range(3))
    now, most = device.taken
    assert now == 0
    # Of one chunk there would be less than two: the next has to be on its way while one is updated.
    limit = chunk_bytes // 8 * 8
    assert limit < most <= 3 * limit


def packed_parameter() -> tuple[nn.Parameter, dict[str, ModelParameter]]:
    packed = nn.Parameter(random_tensor(5, (6, 4)))
    regions = (Region("layers.0.q", 0, 3), Region("layers.0.k", 3, 5), Region("layers.0.v", 5, 6))
    placement = Placement.of("layers.0.qkv", packed, regions)
    return packed, {"layers.0.qkv": ModelParameter(packed, placement)}


def test_the_state_of_a_packed_parameter_is_saved_under_its_parts_in_memory_of_their_own() -> None:
    packed, model = packed_parameter()
    optimizer = build_over(AdamWConfig(), model, "optimizer")
    packed.grad = random_tensor(6, (6, 4))
    optimizer.step(1.0, 1.0)
    tensors = optimizer.tensors()
    assert set(tensors) == {
        f"layers.0.{part}.{key}" for part in "qkv" for key in ("exp_avg", "exp_avg_sq", "step")
    }
    expected = 0.1 * random_tensor(6, (6, 4))  # AdamW's first moment after one update, 1 - beta1 = 0.1
    for part, (start, stop) in {"q": (0, 3), "k": (3, 5), "v": (5, 6)}.items():
        (piece,) = tensors[f"layers.0.{part}.exp_avg"].pieces
        torch.testing.assert_close(piece.tensor, expected[start:stop])
    spans = sorted(
        (piece.tensor.data_ptr(), piece.tensor.data_ptr() + piece.tensor.nbytes)
        for item in tensors.values()
        if item.residence == "host"
        for piece in item.pieces
    )
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))


def test_the_factory_chooses_by_the_setting() -> None:
    with group_of_one() as process:
        kinds: dict[Offload, type] = {"none": ResidentOptimizer, "optimizer": OffloadedStateOptimizer}
        for offload, kind in kinds.items():
            optimizer = build_optimizer(
                AdamWConfig(),
                as_model(parameters()),
                block_parameters=(),
                offload=offload,
                chunk_bytes=CHUNK_BYTES,
                process=process,
            )
            assert type(optimizer) is kind


def names_of_state() -> list[str]:
    process = rank_process()
    named = parameters()
    optimizer = build(AdamWConfig(), named, "optimizer", device=process.device)
    update(named, optimizer, range(1))
    return sorted(optimizer.tensors())


def test_ranks_name_the_same_state_also_where_a_parameter_has_no_elements() -> None:
    first, second = run_ranks(names_of_state, 2)
    assert (
        first
        == second
        == sorted(f"{name}.{key}" for name in SHAPES for key in ("step", "exp_avg", "exp_avg_sq"))
    )
