"""What the engine and the checkpoint ask of an optimizer, wherever its state lives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from trainer.hold import Hold
from trainer.parallel.layout import LogicalTensor


class Optimizer(Protocol):
    """Updates the model's parameters from their gradients; also a part of the checkpoint
    (`checkpoint.base.Part`). Every method is collective.

    One update: `before_backward` before each backward, `grad_norm`, then `step` and `zero_grad`, or
    `zero_grad` alone where the update is skipped.
    """

    def before_backward(self, lr_factor: float | None) -> None:
        """A backward is about to begin.

        Args:
            lr_factor: set before the last one of an update that will be made: an optimizer may update what is
                complete while backward still runs. None otherwise.
        """
        ...

    def grad_norm(self) -> float:
        """Global L2 norm of the accumulated gradient, before clipping."""
        ...

    def step(self, lr_factor: float, grad_scale: float) -> None:
        """One update with every group's learning rate at `lr_factor` times its peak.

        Args:
            grad_scale: factor on all gradients, 1 or (for clipping) less.
        """
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def hold_state_updates(self, hold: Hold) -> None:
        """Before the next updates, wait until `hold` lets go of the host memory that they change."""
        ...

    def weights(self) -> dict[str, LogicalTensor]:
        """Weights that this optimizer keeps in float32 apart from the parameters of the model, which are
        rounded copies then; by logical name. Empty where the parameters are the weights.
        """
        ...

    def weights_loaded(self) -> None:
        """What `weights` gave, or the parameters where it gives nothing, was filled: bring copies up to
        date.
        """
        ...

    def close(self) -> None:
        """Stop what runs in the background, on every end."""
        ...

    def tensors(self) -> dict[str, LogicalTensor]:
        """State tensors under `<parameter>.<state>`."""
        ...

    def values(self) -> dict[str, Any]:
        """Options of every group, JSON values."""
        ...

    def tensors_to_load(self, names: Collection[str]) -> dict[str, LogicalTensor]:
        """State tensors to fill, allocated for exactly `names`."""
        ...

    def loaded(self, values: Mapping[str, Any]) -> None:
        """Take over group options."""
        ...
