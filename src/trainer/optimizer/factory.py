"""From the configuration to an optimizer: parameter groups, and torch's optimizers for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from trainer.config.model import Offload
from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig, SignSGDConfig
from trainer.optimizer.base import Optimizer
from trainer.optimizer.groups import GroupSpec
from trainer.optimizer.offload.optimizer import FullOffloadOptimizer, say_when, why_late
from trainer.optimizer.offload.state import OffloadedStateOptimizer
from trainer.optimizer.resident import ResidentOptimizer
from trainer.optimizer.signsgd import SignSGD
from trainer.parallel.layout import ModelParameter
from trainer.parallel.process import Process

Build = Callable[[Sequence[torch.Tensor], str, float], torch.optim.Optimizer]
"""From tensors, the name of their group and its weight decay to an optimizer."""


def build_optimizer(
    config: OptimizerConfig,
    parameters: Mapping[str, ModelParameter],
    *,
    block_parameters: Collection[str],
    offload: Offload,
    chunk_bytes: int,
    process: Process,
) -> Optimizer:
    """The optimizer over all of `parameters` that require a gradient.

    Args:
        config: the optimizer section.
        parameters: by name.
        block_parameters: names inside the decoder blocks; Muon takes their matrices.
        offload: `model.offload`.
        chunk_bytes: `offload.chunk_mib`, in bytes.
        process: this rank.
    """
    groups = list_groups(config, parameters, block_parameters=block_parameters)
    if offload == "optimizer":
        return OffloadedStateOptimizer(parameters, groups, chunk_bytes=chunk_bytes, device=process.device)
    if offload == "full":
        late_because = why_late(config)
        say_when(process, late_because)
        return FullOffloadOptimizer(
            parameters, groups, chunk_bytes=chunk_bytes, process=process, is_early=late_because is None
        )
    return ResidentOptimizer(parameters, groups)


def list_groups(
    config: OptimizerConfig, parameters: Mapping[str, ModelParameter], *, block_parameters: Collection[str]
) -> list[GroupSpec]:
    """The groups of all of `parameters` that require a gradient; for the arguments see `build_optimizer`."""
    trained = {name: item for name, item in parameters.items() if item.parameter.requires_grad}
    if isinstance(config, MuonConfig):
        matrices = {
            name for name in block_parameters if name in trained and trained[name].parameter.ndim == 2
        }
        muon = {name: item for name, item in trained.items() if name in matrices}
        rest = {name: item for name, item in trained.items() if name not in matrices}
        return [
            *_decay_groups(muon, config.weight_decay, _muon(config), prefix="muon_", is_elementwise=False),
            *_decay_groups(rest, config.weight_decay, _adamw(config)),
        ]
    if isinstance(config, AdamWConfig):
        build = _adamw(config)
    elif isinstance(config, SGDConfig):
        build = _sgd(config)
    else:
        assert isinstance(config, SignSGDConfig)
        build = _signsgd(config)
    return _decay_groups(trained, config.weight_decay, build)


def _adamw(config: AdamWConfig | MuonConfig) -> Build:
    betas = (config.betas[0], config.betas[1])

    def build(tensors: Sequence[torch.Tensor], name: str, weight_decay: float) -> torch.optim.Optimizer:
        group = {"params": list(tensors), "name": name, "weight_decay": weight_decay}
        return torch.optim.AdamW([group], lr=config.lr, betas=betas, eps=config.eps, fused=True)

    return build


def _sgd(config: SGDConfig) -> Build:
    def build(tensors: Sequence[torch.Tensor], name: str, weight_decay: float) -> torch.optim.Optimizer:
        group = {"params": list(tensors), "name": name, "weight_decay": weight_decay}
        return torch.optim.SGD(
            [group], lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, foreach=True
        )

    return build


def _signsgd(config: SignSGDConfig) -> Build:
    def build(tensors: Sequence[torch.Tensor], name: str, weight_decay: float) -> torch.optim.Optimizer:
        return SignSGD([{"params": list(tensors), "name": name, "weight_decay": weight_decay}], lr=config.lr)

    return build


def _muon(config: MuonConfig) -> Build:
    def build(tensors: Sequence[torch.Tensor], name: str, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            [{"params": list(tensors), "name": name, "weight_decay": weight_decay}],
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            adjust_lr_fn=config.adjust_lr,
        )

    return build


def _decay_groups(
    parameters: Mapping[str, ModelParameter],
    weight_decay: float,
    build: Build,
    *,
    prefix: str = "",
    is_elementwise: bool = True,
) -> list[GroupSpec]:
    """Two groups: matrices decay; norms, biases and other 1-D weights do not."""
    decay = tuple(name for name, item in parameters.items() if item.parameter.ndim >= 2)
    others = tuple(name for name in parameters if name not in decay)
    groups = []
    for kind, names, amount in (("decay", decay, weight_decay), ("no_decay", others, 0.0)):
        name = f"{prefix}{kind}"
        if names:
            groups.append(GroupSpec(name, names, _bind(build, name, amount), is_elementwise))
    return groups


def _bind(
    build: Build, name: str, weight_decay: float
) -> Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]:
    return lambda tensors: build(tensors, name, weight_decay)
