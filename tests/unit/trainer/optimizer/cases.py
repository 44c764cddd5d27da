"""A small set of parameters, optimizers over them in every mode, and checkpoints of their state by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig, SignSGDConfig
from trainer.optimizer.base import Optimizer
from trainer.optimizer.factory import list_groups
from trainer.optimizer.offload.state import OffloadedStateOptimizer
from trainer.optimizer.resident import ResidentOptimizer
from trainer.parallel.device import Device
from trainer.parallel.layout import LogicalTensor, ModelParameter, Placement, local_part

Mode = Literal["none", "optimizer"]
MODES: tuple[Mode, ...] = ("none", "optimizer")

CONFIGS: list[OptimizerConfig] = [
    AdamWConfig(lr=0.1, weight_decay=0.1),
    SGDConfig(lr=0.1, momentum=0.9, nesterov=True),
    SignSGDConfig(lr=0.1),
    MuonConfig(lr=0.1),
]
# The norm's only element is on rank 0: the group without decay is empty on rank 1.
SHAPES = {"embed.weight": (5, 4), "layers.0.proj.weight": (6, 4), "layers.0.norm.weight": (1,)}
UNUSED = "layers.0.unused.weight"
CPU = Device(torch.device("cpu"))
# Seven elements with two moments each: every matrix is cut, at places that are nothing special.
CHUNK_BYTES = 7 * 8


def random_tensor(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Sharded by rows in a group of several ranks."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def parameters() -> dict[str, nn.Parameter]:
    """`SHAPES`, and one that never has a gradient."""
    shapes = {**SHAPES, UNUSED: (4, 4)}
    return {
        name: nn.Parameter(random_tensor(index, shape)) for index, (name, shape) in enumerate(shapes.items())
    }


def as_model(named: Mapping[str, nn.Parameter]) -> dict[str, ModelParameter]:
    """Parameters that are logical tensors themselves."""
    return {name: ModelParameter(item, Placement.of(name, item)) for name, item in named.items()}


def build(
    config: OptimizerConfig,
    named: Mapping[str, nn.Parameter],
    mode: Mode = "none",
    *,
    device: Device = CPU,
    chunk_bytes: int = CHUNK_BYTES,
) -> Optimizer:
    """An optimizer over `named`; "layers" are blocks."""
    return build_over(config, as_model(named), mode, device=device, chunk_bytes=chunk_bytes)


def build_over(
    config: OptimizerConfig,
    model: Mapping[str, ModelParameter],
    mode: Mode,
    *,
    device: Device = CPU,
    chunk_bytes: int = CHUNK_BYTES,
) -> Optimizer:
    """As `build`, over parameters with their placement."""
    groups = list_groups(config, model, block_parameters=[name for name in model if "layers" in name])
    if mode == "optimizer":
        return OffloadedStateOptimizer(model, groups, chunk_bytes=chunk_bytes, device=device)
    return ResidentOptimizer(model, groups)


def update(
    named: Mapping[str, nn.Parameter], optimizer: Optimizer, steps: range, grad_scale: float = 1.0
) -> None:
    """Updates `steps` with gradients that only the number of the step decides."""
    for step in steps:
        for index, (name, shape) in enumerate(SHAPES.items()):
            named[name].grad = random_tensor(1000 * (step + 1) + index, shape)
        optimizer.step(1.0 / (step + 1), grad_scale)
        optimizer.zero_grad()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without history."""
    return tensor.detach().clone()


def local_weights(named: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of this rank's shards."""
    return {name: copy_of(local_part(item)) for name, item in named.items()}


def copy_pieces(tensors: Mapping[str, LogicalTensor]) -> dict[str, dict[tuple[int, ...], torch.Tensor]]:
    """Copies of this rank's blocks by name and offsets: what a checkpoint would hold."""
    return {
        name: {piece.offsets: copy_of(piece.tensor) for piece in item.pieces}
        for name, item in tensors.items()
    }


def reload(
    config: OptimizerConfig, named: Mapping[str, nn.Parameter], source: Optimizer, mode: Mode = "none"
) -> Optimizer:
    """A new optimizer with the state of `source`, as a checkpoint would carry it."""
    saved, shapes = copy_pieces(source.tensors()), {name: t.shape for name, t in source.tensors().items()}
    values = json.loads(json.dumps(source.values()))
    optimizer = build(config, named, mode)
    to_load = optimizer.tensors_to_load(saved.keys())
    assert {name: item.shape for name, item in to_load.items()} == shapes
    for name, item in to_load.items():
        assert {piece.offsets for piece in item.pieces} == set(saved[name])
        for piece in item.pieces:
            piece.tensor.copy_(saved[name][piece.offsets])
    optimizer.loaded(values)
    return optimizer


def assert_same_pieces(
    left: Mapping[str, Mapping[tuple[int, ...], Any]],
    right: Mapping[str, Mapping[tuple[int, ...], Any]],
    tolerance: float = 0.0,
) -> None:
    """The same blocks, and no element further apart than `tolerance`."""
    assert left.keys() == right.keys()
    for name, blocks in left.items():
        assert blocks.keys() == right[name].keys(), name
        for offsets, block in blocks.items():
            torch.testing.assert_close(block, right[name][offsets], rtol=0.0, atol=tolerance, msg=name)
