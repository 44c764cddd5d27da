"""Full offload over parameters that ranks share unequally: some hold nothing of one, or all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.engine import rank_process, whole
from tests.support.ranks import run_ranks
from trainer.config.optimizer import AdamWConfig
from trainer.optimizer.factory import build_optimizer
from trainer.parallel.layout import ModelParameter, Placement
from trainer.parallel.process import Process

# The bias' only element is on rank 0: the group without decay is empty on rank 1.
SHAPES = {"matrix.weight": (5, 4), "replica.weight": (3, 4), "bias": (1,)}
CONFIG = AdamWConfig(lr=0.1, weight_decay=0.1)


def tensor_of(seed: int, name: str, mesh: DeviceMesh) -> torch.Tensor:
    tensor = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
    return tensor if name == "replica.weight" else distribute_tensor(tensor, mesh, [Shard(0)])


def hand_over(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """As FSDP does when it has reduced a gradient."""
    parameter.grad = gradient
    hooks: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    for hook in hooks.values():
        hook(parameter)


def three_updates(process: Process) -> tuple[list[float], dict[str, Any], list[str], int]:
    """Norms, weights, names of the state, and the elements of it that are on this rank."""
    mesh = init_device_mesh("cpu", (process.world_size,))
    named = {name: nn.Parameter(tensor_of(place, name, mesh)) for place, name in enumerate(SHAPES)}
    model = {name: ModelParameter(item, Placement.of(name, item)) for name, item in named.items()}
    optimizer = build_optimizer(
        CONFIG, model, block_parameters=(), offload="full", chunk_bytes=28, process=process
    )
    norms = []
    for step in range(3):
        optimizer.before_backward(1.0)
        for place, (name, parameter) in enumerate(named.items()):
            hand_over(parameter, tensor_of(10 * step + place, name, mesh))
        norms.append(optimizer.grad_norm())
        optimizer.step(1.0, 0.5)
        optimizer.zero_grad()
    optimizer.close()
    state = optimizer.tensors()
    held = sum(piece.tensor.numel() for item in state.values() for piece in item.pieces)
    return norms, {name: whole(item) for name, item in named.items()}, sorted(state), held


def on_ranks() -> tuple[list[float], dict[str, Any], list[str], int]:
    return three_updates(rank_process())


def test_norms_weights_and_names_of_state_do_not_depend_on_who_holds_what(process: Process) -> None:
    norms, weights, names, _ = three_updates(process)
    results = run_ranks(on_ranks, 2)
    # Matrix, replica and bias with two moments each, and three counters.
    assert [result[3] for result in results] == [2 * (12 + 12 + 1) + 3, 2 * (8 + 12) + 3]
    for of_rank in results:
        assert of_rank[0] == pytest.approx(norms, rel=1e-6)
        assert of_rank[2] == names
        for name, item in weights.items():
            torch.testing.assert_close(
                torch.from_numpy(of_rank[1][name]), torch.from_numpy(item), rtol=1e-6, atol=1e-7
            )
