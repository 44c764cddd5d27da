"""One and two updates of every optimizer in every mode, against its formula written out with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.trainer.optimizer.cases import MODES, Mode, build
from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig, SignSGDConfig

LR, DECAY = 0.1, 0.5
pytestmark = pytest.mark.parametrize("mode", MODES)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (5, 4), "layers.0.proj.weight": (6, 4), "layers.0.norm.weight": (4,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(item.shape, generator=generator) for name, item in parameters().items()}


def after_updates(config: OptimizerConfig, factors: list[float], mode: Mode) -> dict[str, Any]:
    named = parameters()
    optimizer = build(config, named, mode)
    for step, factor in enumerate(factors):
        for name, gradient in gradients(step).items():
            named[name].grad = gradient
        optimizer.step(factor, 1.0)
        optimizer.zero_grad()
        assert all(item.grad is None for item in named.values())
    return {name: item.detach().double().numpy() for name, item in named.items()}


def decay_of(name: str) -> float:
    return 0.0 if "norm" in name else DECAY


def adamw_by_hand(name: str, factors: list[float]) -> Any:
    """Algorithm 2 of Loshchilov & Hutter 2019."""
    weight = parameters()[name].detach().double().numpy()
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, factor in enumerate(factors):
        gradient, lr = gradients(step)[name].double().numpy(), LR * factor
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        corrected = np.sqrt(second / (1 - 0.9 ** (step + 1))) + 1e-3
        weight = weight - lr * decay_of(name) * weight
        weight = weight - lr * (first / (1 - 0.8 ** (step + 1))) / corrected
    return weight


@pytest.mark.parametrize("name", parameters())
def test_adamw(name: str, mode: Mode) -> None:
    config = AdamWConfig(lr=LR, weight_decay=DECAY, betas=[0.8, 0.9], eps=1e-3)
    factors = [1.0, 0.5]
    np.testing.assert_allclose(
        after_updates(config, factors, mode)[name], adamw_by_hand(name, factors), atol=1e-6
    )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", parameters())
def test_sgd(name: str, nesterov: bool, mode: Mode) -> None:
    config = SGDConfig(lr=LR, weight_decay=DECAY, momentum=0.9, nesterov=nesterov)
    weight = parameters()[name].detach().double().numpy()
    velocity: Any = None
    for step, factor in enumerate([1.0, 0.5]):
        gradient = gradients(step)[name].double().numpy() + decay_of(name) * weight
        velocity = gradient if velocity is None else 0.9 * velocity + gradient
        weight = weight - LR * factor * (gradient + 0.9 * velocity if nesterov else velocity)
    np.testing.assert_allclose(after_updates(config, [1.0, 0.5], mode)[name], weight, atol=1e-6)


@pytest.mark.parametrize("name", parameters())
def test_signsgd(name: str, mode: Mode) -> None:
    weight = parameters()[name].detach().double().numpy()
    expected = weight * (1 - LR * 0.5 * decay_of(name)) - LR * 0.5 * np.sign(gradients(0)[name].numpy())
    config = SignSGDConfig(lr=LR, weight_decay=DECAY)
    np.testing.assert_allclose(after_updates(config, [0.5], mode)[name], expected, atol=1e-6)


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest(mode: Mode) -> None:
    config = MuonConfig(lr=LR, weight_decay=DECAY, betas=[0.8, 0.9], eps=1e-3, adjust_lr="original")
    updated = after_updates(config, [1.0, 0.5], mode)
    for name in ("embed.weight", "layers.0.norm.weight"):
        np.testing.assert_allclose(updated[name], adamw_by_hand(name, [1.0, 0.5]), atol=1e-6)
    name = "layers.0.proj.weight"
    plain = nn.Parameter(parameters()[name].detach().clone())
    own = torch.optim.Muon([plain], lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=True)
    for step, factor in enumerate([1.0, 0.5]):
        own.param_groups[0]["lr"] = LR * factor
        plain.grad = gradients(step)[name]
        own.step()
    np.testing.assert_array_equal(updated[name], plain.detach().double().numpy())
    # The update of a matrix is (nearly) orthogonal: its singular values are about 1, times the scale.
    first = (
        after_updates(config, [1.0], mode)[name]
        - (1 - LR * DECAY) * parameters()[name].detach().double().numpy()
    )
    singular = np.linalg.svd(first / LR / np.sqrt(6 / 4), compute_uv=False)
    assert singular.min() > 0.6 and singular.max() < 1.25


def test_only_matrices_decay(mode: Mode) -> None:
    for config in (AdamWConfig(weight_decay=DECAY), SGDConfig(weight_decay=DECAY)):
        groups = build(config, parameters(), mode).values()["groups"]
        decays = {name: record["options"]["weight_decay"] for name, record in groups.items()}
        assert decays == {"decay": DECAY, "no_decay": 0.0}
    groups = build(MuonConfig(weight_decay=DECAY), parameters(), mode).values()["groups"]
    decays = {name: record["options"]["weight_decay"] for name, record in groups.items()}
    assert decays == {"muon_decay": DECAY, "decay": DECAY, "no_decay": 0.0}


def test_a_frozen_parameter_is_left_alone(mode: Mode) -> None:
    named = parameters()
    named["embed.weight"].requires_grad_(False)
    before = named["embed.weight"].detach().clone()
    optimizer = build(AdamWConfig(lr=LR, weight_decay=DECAY), named, mode)
    for name, gradient in gradients(0).items():
        if named[name].requires_grad:
            named[name].grad = gradient
    optimizer.step(1.0, 1.0)
    assert torch.equal(named["embed.weight"], before)
    assert not any(name.startswith("embed") for name in optimizer.tensors())
