"""What the engine and the checkpoint ask of an optimizer, wherever its state lives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch


class Optimizer(Protocol):
    """Updates the model's parameters from their gradients; also a part of the checkpoint
    (`checkpoint.base.Part`).
    """

    def step(self, lr_factor: float) -> None:
        """One update with every group's learning rate at `lr_factor` times its peak."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """State tensors under `<parameter>.<state>`, by reference."""
        ...

    def values(self) -> dict[str, Any]:
        """Options of every group, JSON values."""
        ...

    def tensors_to_load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """State tensors to fill, allocated for exactly `names`."""
        ...

    def loaded(self, values: Mapping[str, Any]) -> None:
        """Take over group options."""
        ...
