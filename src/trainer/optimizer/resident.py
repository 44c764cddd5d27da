"""Optimizer whose state lives beside the parameters: torch's optimizers, one per group, behind one
interface.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.hold import Hold
from trainer.optimizer.groups import (
    COUNTER,
    CounterTargets,
    GroupOptions,
    GroupSpec,
    named_gradients,
    saved_keys,
    state_tensors,
)
from trainer.parallel.layout import LogicalTensor, ModelParameter, local_part


class ResidentOptimizer:
    """Implements `Optimizer`.

    Args:
        parameters: every trained parameter by its name.
        groups: together they hold each parameter once.
    """

    def __init__(self, parameters: Mapping[str, ModelParameter], groups: Sequence[GroupSpec]) -> None:
        self._parameters = {name: item for name, item in parameters.items() if item.parameter.requires_grad}
        self._optimizers = [
            group.build([parameters[name].parameter for name in group.parameters]) for group in groups
        ]
        self._owners = {
            name: optimizer
            for group, optimizer in zip(groups, self._optimizers, strict=True)
            for name in group.parameters
        }
        self._options = GroupOptions(self._optimizers)
        self._counter_targets = CounterTargets(self._parameters, {})

    def before_backward(self, lr_factor: float | None) -> None:
        """See `Optimizer`: nothing happens before `step`."""

    def grad_norm(self) -> float:
        """See `Optimizer`."""
        return gradient_norm(named_gradients(item.parameter for item in self._parameters.values()))

    def step(self, lr_factor: float, grad_scale: float) -> None:
        """See `Optimizer`."""
        scale_gradients(named_gradients(item.parameter for item in self._parameters.values()), grad_scale)
        self._options.set_lr_factor(lr_factor)
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """See `Optimizer`."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def hold_state_updates(self, hold: Hold) -> None:
        """See `Optimizer`: none of the state is on the host, so nothing of it is held."""

    def weights(self) -> dict[str, LogicalTensor]:
        """See `Optimizer`: the parameters are the weights."""
        return {}

    def weights_loaded(self) -> None:
        """See `Optimizer`: there are no copies."""

    def close(self) -> None:
        """See `Optimizer`: nothing runs in the background."""

    def tensors(self) -> dict[str, LogicalTensor]:
        """See `Optimizer`."""
        state = {
            name: {
                key: local_part(item)
                for key, item in optimizer.state.get(self._parameters[name].parameter, {}).items()
                if isinstance(item, torch.Tensor)
            }
            for name, optimizer in self._owners.items()
        }
        return state_tensors(self._parameters, state, "device")

    def values(self) -> dict[str, Any]:
        """See `Optimizer`."""
        return self._options.values()

    def tensors_to_load(self, names: Collection[str]) -> dict[str, LogicalTensor]:
        """See `Optimizer`.

        Raises:
            CheckpointError: the state belongs to a parameter that this model does not have.
        """
        keys = saved_keys(self._parameters, names)
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for name, of_parameter in keys.items():
            optimizer, parameter = self._owners[name], self._parameters[name].parameter
            for key in of_parameter:
                # torch keeps the count of updates as a scalar on the host unless the update is fused on the
                # device.
                optimizer.state[parameter][key] = (
                    torch.zeros((), device=counter_device(optimizer, parameter))
                    if key == COUNTER
                    else torch.zeros_like(parameter).detach()
                )
        counters = {
            name: optimizer.state[self._parameters[name].parameter][COUNTER]
            for name, optimizer in self._owners.items()
            if COUNTER in keys.get(name, [])
        }
        self._counter_targets = CounterTargets(self._parameters, counters)
        return {**self.tensors(), **self._counter_targets.tensors()}

    def loaded(self, values: Mapping[str, Any]) -> None:
        """See `Optimizer`.

        Raises:
            CheckpointError: the state belongs to another optimizer, its groups are others, or the parts of a
                packed
                parameter do not fit together.
        """
        self._counter_targets.check()
        self._options.load(values)


def gradient_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Global L2 norm of gradients on the device (DTensors, or tensors that every rank holds whole)."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())


def scale_gradients(gradients: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply gradients in place; a factor of 1 changes nothing."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)


def counter_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.device:
    """Where `optimizer` expects the counter of `parameter`."""
    return parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
