"""The weights of full offload are float32 on the host; the device has rounded copies."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config.optimizer import AdamWConfig, SignSGDConfig
from trainer.optimizer.factory import list_groups
from trainer.optimizer.offload.optimizer import FullOffloadOptimizer
from trainer.parallel.layout import ModelParameter, Placement
from trainer.parallel.process import Process

SHAPES = {"first.weight": (5, 4), "second.weight": (6, 4), "norm.weight": (4,)}
CHUNK_BYTES = 28


def random_tensor(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_weights_keep_what_the_copies_on_the_device_round_away(process: Process) -> None:
    exact = {name: random_tensor(seed, shape) for seed, (name, shape) in enumerate(SHAPES.items())}
    named = {name: nn.Parameter(item.bfloat16()) for name, item in exact.items()}
    model = {
        name: ModelParameter(named[name], Placement.of(name, named[name]), item)
        for name, item in exact.items()
    }
    groups = list_groups(SignSGDConfig(lr=2**-12, weight_decay=0.0), model, block_parameters=())
    optimizer = FullOffloadOptimizer(model, groups, chunk_bytes=CHUNK_BYTES, process=process, is_early=False)
    for _ in range(16):  # each too small for bfloat16
        optimizer.before_backward(1.0)
        torch.stack([item.sum() for item in named.values()]).sum().backward()
        optimizer.step(1.0, 1.0)
        optimizer.zero_grad()
    for name, item in optimizer.weights().items():
        weights = item.pieces[0].tensor
        torch.testing.assert_close(weights, exact[name] - 16 * 2**-12, rtol=0, atol=1e-5)
        assert torch.equal(named[name], weights.bfloat16())
    optimizer.close()


def test_a_frozen_parameter_keeps_its_exact_weights_and_follows_loaded_ones(process: Process) -> None:
    exact = {name: random_tensor(seed, shape) for seed, (name, shape) in enumerate(SHAPES.items())}
    named = {name: nn.Parameter(item.bfloat16(), name != "first.weight") for name, item in exact.items()}
    model = {
        name: ModelParameter(named[name], Placement.of(name, named[name]), item.clone())
        for name, item in exact.items()
    }
    groups = list_groups(AdamWConfig(), model, block_parameters=())
    optimizer = FullOffloadOptimizer(model, groups, chunk_bytes=CHUNK_BYTES, process=process, is_early=False)
    frozen = optimizer.weights()["first.weight"].pieces[0].tensor
    assert torch.equal(frozen, exact["first.weight"])
    frozen.fill_(3.0)
    optimizer.weights_loaded()
    assert (named["first.weight"] == 3.0).all()
    optimizer.close()
