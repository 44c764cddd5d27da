"""State of optimizers that is saved, loaded into a new one, and goes on bit for bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from contract.errors import CheckpointError
from tests.support.engine import whole
from tests.support.ranks import run_ranks
from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig, SignSGDConfig
from trainer.optimizer.factory import build_optimizer
from trainer.optimizer.resident import ResidentOptimizer

CONFIGS: list[OptimizerConfig] = [
    AdamWConfig(lr=0.1, weight_decay=0.1),
    SGDConfig(lr=0.1, momentum=0.9, nesterov=True),
    SignSGDConfig(lr=0.1),
    MuonConfig(lr=0.1),
]
# The norm's only element is on rank 0: the group without decay is empty on rank 1.
SHAPES = {"embed.weight": (5, 4), "layers.0.proj.weight": (6, 4), "layers.0.norm.weight": (1,)}
UNUSED = "layers.0.unused.weight"


def random_tensor(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def parameters() -> dict[str, nn.Parameter]:
    shapes = {**SHAPES, UNUSED: (4, 4)}
    return {
        name: nn.Parameter(random_tensor(index, shape)) for index, (name, shape) in enumerate(shapes.items())
    }


def build(config: OptimizerConfig, named: Mapping[str, nn.Parameter]) -> ResidentOptimizer:
    return build_optimizer(config, named, block_parameters=[name for name in named if "layers" in name])


def update(named: Mapping[str, nn.Parameter], optimizer: ResidentOptimizer, steps: range) -> None:
    for step in steps:
        for index, (name, shape) in enumerate(SHAPES.items()):
            named[name].grad = random_tensor(1000 * (step + 1) + index, shape)
        optimizer.step(1.0 / (step + 1))
        optimizer.zero_grad()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def reload(
    config: OptimizerConfig, named: dict[str, nn.Parameter], source: ResidentOptimizer
) -> ResidentOptimizer:
    """A new optimizer with the state of `source`, as a checkpoint would carry it."""
    saved = {name: copy_of(item) for name, item in source.tensors().items()}
    values = json.loads(json.dumps(source.values()))
    optimizer = build(config, named)
    for name, item in optimizer.tensors_to_load(saved.keys()).items():
        assert item.shape == saved[name].shape
        assert isinstance(item, DTensor) == isinstance(saved[name], DTensor)
        item.copy_(saved[name])
    optimizer.loaded(values)
    return optimizer


def go_on(config: OptimizerConfig) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Weights after four updates in one go, and with a reload in the middle; names of the state."""
    named = parameters()
    optimizer = build(config, named)
    update(named, optimizer, range(4))
    again = parameters()
    first = build(config, again)
    update(again, first, range(2))
    moved = {name: nn.Parameter(copy_of(item)) for name, item in again.items()}
    second = reload(config, moved, first)
    update(moved, second, range(2, 4))
    assert optimizer.values() == second.values()
    return (
        {name: whole(item) for name, item in named.items()},
        {name: whole(item) for name, item in moved.items()},
        sorted(second.tensors()),
    )


def check_equal(result: tuple[dict[str, Any], dict[str, Any], list[str]]) -> None:
    straight, resumed, names = result
    for name, item in straight.items():
        assert (item == resumed[name]).all(), name
    assert not any(name.startswith(UNUSED) for name in names)  # it never had a gradient


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_a_reloaded_optimizer_goes_on_bit_for_bit(config: OptimizerConfig) -> None:
    check_equal(go_on(config))


def go_on_with_all() -> list[tuple[dict[str, Any], dict[str, Any], list[str]]]:
    return [go_on(config) for config in CONFIGS]


def test_sharded_state_goes_on_bit_for_bit_and_updates_equal_those_of_one_rank() -> None:
    for of_rank in run_ranks(go_on_with_all, 2):
        for config, result in zip(CONFIGS, of_rank, strict=True):
            check_equal(result)
            for name, item in go_on(config)[0].items():
                # Muon's iteration multiplies bfloat16 matrices, whose sums a split orders differently.
                tolerance = 4e-3 if config.type == "muon" and "proj" in name else 1e-6
                assert abs(item - result[0][name]).max() <= tolerance, (config.type, name)


def test_state_has_the_names_of_parameters() -> None:
    named = parameters()
    optimizer = build(AdamWConfig(), named)
    assert optimizer.tensors() == {}
    update(named, optimizer, range(1))
    assert set(optimizer.tensors()) == {
        f"{name}.{key}" for name in SHAPES for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_the_options_of_every_group_survive_also_those_changed_while_training() -> None:
    named = parameters()
    config = AdamWConfig(lr=0.1, weight_decay=0.3, betas=[0.7, 0.8])
    source = build(config, named)
    update(named, source, range(2))
    values = json.loads(json.dumps(source.values()))
    values["groups"]["no_decay"]["options"]["weight_decay"] = 0.25
    values["groups"]["no_decay"]["peak_lr"] = 0.05
    optimizer = build(config, parameters())
    optimizer.loaded(values)
    assert optimizer.values() == values
    assert optimizer.values()["groups"]["decay"]["options"]["lr"] == pytest.approx(0.05)
    assert optimizer.values()["groups"]["decay"]["options"]["betas"] == [0.7, 0.8]
    optimizer.step(1.0)
    live = {name: record["options"]["lr"] for name, record in optimizer.values()["groups"].items()}
    assert live == {"decay": 0.1, "no_decay": 0.05}


def test_a_changed_setting_wins_over_the_checkpoint_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    source = build(AdamWConfig(lr=0.1, weight_decay=0.1, eps=1e-6), parameters())
    optimizer = build(AdamWConfig(lr=0.2, weight_decay=0.1, eps=1e-6), parameters())
    with caplog.at_level(logging.WARNING):
        optimizer.loaded(json.loads(json.dumps(source.values())))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"optimizer group {group}: lr was 0.1 in the checkpoint; the configuration's 0.2 is used"
        for group in ("decay", "no_decay")
    ]
    optimizer.step(0.5)
    assert optimizer.values()["groups"]["decay"]["options"]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (SGDConfig(momentum=0.9), r"decay \(SGD\), no_decay \(SGD\)"),
        (SignSGDConfig(), r"decay \(SignSGD\), no_decay \(SignSGD\)"),
        (MuonConfig(), r"muon_decay \(Muon\)"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(other: OptimizerConfig, named: str) -> None:
    values = build(other, parameters()).values()
    with pytest.raises(
        CheckpointError, match=named + r".*, this one decay \(AdamW\), no_decay \(AdamW\); keep"
    ):
        build(AdamWConfig(), parameters()).loaded(values)


def test_state_of_a_parameter_that_is_not_trained_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"optimizer state for 'layers.9.weight'"):
        build(AdamWConfig(), parameters()).tensors_to_load(["layers.9.weight.exp_avg"])


def test_loading_forgets_the_state_there_was() -> None:
    named = parameters()
    optimizer = build(AdamWConfig(), named)
    update(named, optimizer, range(1))
    assert optimizer.tensors_to_load([]) == {} and optimizer.tensors() == {}
