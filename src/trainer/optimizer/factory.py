"""From the configuration to an optimizer: parameter groups, and torch's optimizers for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig, SignSGDConfig
from trainer.optimizer.resident import ResidentOptimizer
from trainer.optimizer.signsgd import SignSGD


def build_optimizer(
    config: OptimizerConfig, parameters: Mapping[str, nn.Parameter], *, block_parameters: Collection[str]
) -> ResidentOptimizer:
    """The optimizer over all of `parameters` that require a gradient.

    Args:
        config: the optimizer section.
        parameters: by logical name.
        block_parameters: names inside the decoder blocks; Muon takes their matrices.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if isinstance(config, MuonConfig):
        matrices = {name for name in block_parameters if name in trained and trained[name].ndim == 2}
        muon = {name: parameter for name, parameter in trained.items() if name in matrices}
        rest = {name: parameter for name, parameter in trained.items() if name not in matrices}
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                _groups(muon, config.weight_decay, "muon_"),
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                adjust_lr_fn=config.adjust_lr,
            ),
            _adamw(_groups(rest, config.weight_decay), config.lr, config.betas, config.eps),
        ]
        return ResidentOptimizer(parameters, optimizers)
    groups = _groups(trained, config.weight_decay)
    if isinstance(config, AdamWConfig):
        optimizer: torch.optim.Optimizer = _adamw(groups, config.lr, config.betas, config.eps)
    elif isinstance(config, SGDConfig):
        optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, foreach=True
        )
    else:
        assert isinstance(config, SignSGDConfig)
        optimizer = SignSGD(groups, lr=config.lr)
    return ResidentOptimizer(parameters, [optimizer])


def _adamw(groups: list[dict[str, Any]], lr: float, betas: list[float], eps: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True)


def _groups(
    parameters: Mapping[str, nn.Parameter], weight_decay: float, prefix: str = ""
) -> list[dict[str, Any]]:
    """Two groups: matrices decay; norms, biases and other 1-D weights do not."""
    decay = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    others = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"name": f"{prefix}decay", "params": decay, "weight_decay": weight_decay},
        {"name": f"{prefix}no_decay", "params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
