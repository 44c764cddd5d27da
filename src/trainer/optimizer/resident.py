"""Optimizer whose state lives beside the parameters: one or more torch optimizers behind one interface.

State is named after parameters, not after positions in groups: a checkpoint stays valid when groups are built
    in
another order, or when a parameter never had a gradient and so has no state.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from contract.errors import CheckpointError

logger = logging.getLogger(__name__)

# Everything else in torch's param groups is an option that a checkpoint has to carry.
_NOT_OPTIONS = {"params", "name", "param_names"}


class ResidentOptimizer:
    """Drives `optimizers`, whose groups carry a unique `name`.

    Args:
        parameters: every trained parameter by its logical name.
        optimizers: together they own each parameter once.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._optimizers = list(optimizers)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._owners = {
            self._names[id(parameter)]: (optimizer, parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._peak_lr = {group["name"]: float(group["lr"]) for group in self._groups()}
        self._configured = {group["name"]: _options(group) for group in self._groups()}
        self._kinds = {
            group["name"]: type(optimizer).__name__
            for optimizer in optimizers
            for group in optimizer.param_groups
        }

    def step(self, lr_factor: float) -> None:
        """See `Optimizer`."""
        for group in self._groups():
            group["lr"] = self._peak_lr[group["name"]] * lr_factor
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """See `Optimizer`."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """See `Optimizer`."""
        return {
            f"{name}.{key}": item
            for name, (optimizer, parameter) in self._owners.items()
            for key, item in optimizer.state.get(parameter, {}).items()
            if isinstance(item, torch.Tensor)
        }

    def values(self) -> dict[str, Any]:
        """Per group its optimizer, its live options, its peak learning rate, and the options as the
        configuration set them.
        """
        return {
            "groups": {
                group["name"]: {
                    "optimizer": self._kinds[group["name"]],
                    "options": _options(group),
                    "peak_lr": self._peak_lr[group["name"]],
                    "configured": self._configured[group["name"]],
                }
                for group in self._groups()
            }
        }

    def tensors_to_load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """See `Optimizer`.

        Raises:
            CheckpointError: the state belongs to a parameter that this model does not have.
        """
        for optimizer in self._optimizers:
            optimizer.state.clear()
        tensors = {}
        for full_name in sorted(names):
            name, _, key = full_name.rpartition(".")
            if name not in self._owners:
                raise CheckpointError(
                    f"the checkpoint holds optimizer state for {name!r}, which this model does not train; "
                    f"resume with "
                    "the same model, or leave the state out with resume.skip_optimizer"
                )
            optimizer, parameter = self._owners[name]
            # torch keeps the count of updates as a scalar on the host unless the update is fused on the
            # device.
            item = (
                torch.zeros((), device=_step_device(optimizer, parameter))
                if key == "step"
                else torch.zeros_like(parameter)
            )
            optimizer.state[parameter][key] = item.detach()
            tensors[full_name] = optimizer.state[parameter][key]
        return tensors

    def loaded(self, values: Mapping[str, Any]) -> None:
        """Take over the options of every group, unless the configuration was changed since the save.

        Raises:
            CheckpointError: the state belongs to another optimizer, or its groups are others.
        """
        saved = values["groups"]
        then_groups = {name: record["optimizer"] for name, record in saved.items()}
        if then_groups != self._kinds:
            raise CheckpointError(
                f"the checkpoint's optimizer has groups {_describe(then_groups)}, this one "
                f"{_describe(self._kinds)}; keep optimizer.type, or leave the state out with "
                f"resume.skip_optimizer"
            )
        for group in self._groups():
            record, configured = saved[group["name"]], self._configured[group["name"]]
            for option, now in configured.items():
                then = record["configured"].get(option)
                if then == now and option in record["options"]:
                    live = record["options"][option]
                    group[option] = tuple(live) if isinstance(group[option], tuple) else live
                    if option == "lr":
                        self._peak_lr[group["name"]] = record["peak_lr"]
                else:
                    logger.warning(
                        "optimizer group %s: %s was %s in the checkpoint; the configuration's %s is used",
                        group["name"], option, then, now,
                    )  # fmt: skip

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a torch group as JSON values."""
    return {
        key: list(item) if isinstance(item, tuple) else item
        for key, item in group.items()
        if key not in _NOT_OPTIONS
    }


def _describe(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in sorted(kinds.items()))


def _step_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.device:
    return parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
