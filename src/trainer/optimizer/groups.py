"""What all optimizers share, wherever their state lives: parameter groups, their options, and the names of
state.

State is named after logical parameters, not after positions in groups: a checkpoint stays valid when groups
are built in another order, when parameters are packed or not, or when one never had a gradient and so has no
state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from contract.errors import CheckpointError
from trainer.parallel.layout import LogicalTensor, ModelParameter, Residence

logger = logging.getLogger(__name__)

COUNTER = "step"
"""The one state of torch's optimizers that is a scalar: the number of updates."""

# Everything else in torch's param groups is an option that a checkpoint has to carry.
_NOT_OPTIONS = {"params", "name", "param_names"}


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Parameters that share their options.

    Attributes:
        name: unique; under it the options are saved.
        parameters: names.
        build: makes a torch optimizer with these options over some tensors (at least one); its only group is
            called
            `name`. Where state is moved in chunks there is one optimizer per chunk.
        is_elementwise: whether an element's update depends on no other element, so that a parameter may be
            cut.
    """

    name: str
    parameters: tuple[str, ...]
    build: Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
    is_elementwise: bool


class GroupOptions:
    """The live options of all groups, which checkpoints carry and the schedule changes.

    Args:
        optimizers: each with one group; groups of one name have the same options, and keep them.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._kinds: dict[str, str] = {}
        for optimizer in optimizers:
            (group,) = optimizer.param_groups
            self._groups.setdefault(group["name"], []).append(group)
            self._kinds[group["name"]] = type(optimizer).__name__
        self._configured = {name: _options(groups[0]) for name, groups in self._groups.items()}
        self._peak_lr = {name: float(groups[0]["lr"]) for name, groups in self._groups.items()}

    def set_lr_factor(self, factor: float) -> None:
        """Set every learning rate to `factor` times its peak."""
        for name, groups in self._groups.items():
            for group in groups:
                group["lr"] = self._peak_lr[name] * factor

    def values(self) -> dict[str, Any]:
        """Per group its optimizer, its live options, its peak learning rate, and the options as the
        configuration set them; JSON values.
        """
        return {
            "groups": {
                name: {
                    "optimizer": self._kinds[name],
                    "options": _options(groups[0]),
                    "peak_lr": self._peak_lr[name],
                    "configured": self._configured[name],
                }
                for name, groups in self._groups.items()
            }
        }

    def load(self, values: Mapping[str, Any]) -> None:
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
        for name in self._groups:
            self._load_group(name, saved[name])

    def _load_group(self, name: str, record: Mapping[str, Any]) -> None:
        for option, now in self._configured[name].items():
            then = record["configured"].get(option)
            if then != now or option not in record["options"]:
                logger.warning(
                    "optimizer group %s: %s was %s in the checkpoint; the configuration's %s is used",
                    name, option, then, now,
                )  # fmt: skip
                continue
            live = record["options"][option]
            for group in self._groups[name]:
                group[option] = tuple(live) if isinstance(group[option], tuple) else live
            if option == "lr":
                self._peak_lr[name] = record["peak_lr"]


def build_carriers(
    groups: Sequence[GroupSpec], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.optim.Optimizer]:
    """One optimizer per group, by its name: it carries the options, and is given the tensors of one chunk at
    a time.

    Args:
        tensors: by name of the parameter, to build the optimizers with; none is left in them.
    """
    carriers = {group.name: group.build([tensors[name] for name in group.parameters]) for group in groups}
    for optimizer in carriers.values():
        optimizer.param_groups[0]["params"] = []
    return carriers


def state_tensors(
    parameters: Mapping[str, ModelParameter],
    state: Mapping[str, Mapping[str, torch.Tensor]],
    residence: Residence,
) -> dict[str, LogicalTensor]:
    """The state of every parameter under `<logical name>.<key>`.

    Args:
        state: by name of the run-time parameter: counters, and shards of the parameter's local shape.
    """
    tensors: dict[str, LogicalTensor] = {}
    for name, of_parameter in state.items():
        placement = parameters[name].placement
        for key, item in of_parameter.items():
            if key == COUNTER:
                tensors |= {
                    f"{logical}.{key}": LogicalTensor.replicated(item, residence)
                    for logical in placement.names
                }
            else:
                tensors |= {
                    f"{logical}.{key}": part for logical, part in placement.logical(item, residence).items()
                }
    return tensors


def saved_keys(parameters: Mapping[str, ModelParameter], names: Collection[str]) -> dict[str, list[str]]:
    """Which state a checkpoint holds for every run-time parameter: keys by name, sorted; out of the saved
    `names`.

    Raises:
        CheckpointError: some state belongs to a parameter that is not trained here, or only a part of a
            packed parameter has state.
    """
    owners = {logical: name for name, item in parameters.items() for logical in item.placement.names}
    found: dict[str, dict[str, set[str]]] = {}
    for full_name in sorted(names):
        logical, _, key = full_name.rpartition(".")
        if logical not in owners:
            raise CheckpointError(
                f"the checkpoint holds optimizer state for {logical!r}, which this model does not train; "
                f"resume with the same model, or leave the state out with resume.skip_optimizer"
            )
        found.setdefault(owners[logical], {}).setdefault(key, set()).add(logical)
    for name, by_key in found.items():
        for key, logical_names in by_key.items():
            missing = set(parameters[name].placement.names) - logical_names
            if missing:
                raise CheckpointError(
                    f"the checkpoint holds {key} for {min(logical_names)}, but not for {min(missing)}, "
                    f"with which "
                    f"model.fusions packs it; resume without that fusion, or with resume.skip_optimizer"
                )
    return {name: list(by_key) for name, by_key in found.items()}


class CounterTargets:
    """Where the counters of a checkpoint are read to. A packed parameter has one, its parts have one each in
    the checkpoint: they are read apart, and have to agree.

    Args:
        counters: by name of the run-time parameter.
    """

    def __init__(
        self, parameters: Mapping[str, ModelParameter], counters: Mapping[str, torch.Tensor]
    ) -> None:
        self._parts = {
            name: {
                logical: counter if index == 0 else torch.zeros_like(counter)
                for index, logical in enumerate(parameters[name].placement.names)
            }
            for name, counter in counters.items()
        }

    def tensors(self) -> dict[str, LogicalTensor]:
        """By `<logical name>.step`."""
        return {
            f"{logical}.{COUNTER}": LogicalTensor.replicated(counter)
            for parts in self._parts.values()
            for logical, counter in parts.items()
        }

    def check(self) -> None:
        """After they were filled.

        Raises:
            CheckpointError: parts of one packed parameter were updated different numbers of times.
        """
        for parts in self._parts.values():
            counts = {logical: int(counter) for logical, counter in parts.items()}
            if len(set(counts.values())) > 1:
                raise CheckpointError(
                    f"model.fusions packs parameters that the checkpoint has updated different numbers of "
                    f"times: "
                    f"{counts}; resume without that fusion, or with resume.skip_optimizer"
                )


def named_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients that there are."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a torch group as JSON values."""
    return {
        key: list(item) if isinstance(item, tuple) else item
        for key, item in group.items()
        if key not in _NOT_OPTIONS
    }


def _describe(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in sorted(kinds.items()))
