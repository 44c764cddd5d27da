"""What the loop calls beside the update. A hook changes nothing that a later update depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trainer.state import TrainState


class Hook(Protocol):
    """All methods are collective: every rank has the same hooks in the same order."""

    def before_training(self, state: TrainState) -> Mapping[str, float]:
        """Called once before the first step of this process; returns metrics of the step reached so far."""
        ...

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        """Called after every step; returns metrics of the step."""
        ...

    def finish(self, state: TrainState) -> Mapping[str, float]:
        """Called once when the run reached its end (not when it was interrupted); returns metrics of the
        last step.
        """
        ...

    def close(self) -> None:
        """Release what the hook holds; called on every end."""
        ...


class BaseHook:
    """Does nothing anywhere; hooks override what they need."""

    def before_training(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        return {}

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        return {}

    def finish(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        return {}

    def close(self) -> None:
        """See `Hook`."""
