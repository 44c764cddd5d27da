"""What the engine asks of an objective.

Legend: T tokens of a row, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

Head = Callable[[torch.Tensor], torch.Tensor]
"""Final projection: hidden [N, D] to logits [N, V], in the type of the model's computation."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A micro-batch on the device; see `contract.batch.MicroBatch` for the streams.

    Opaque to FSDP, whose hooks would otherwise cast the float streams to the compute type.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    document_bounds: tuple[int, ...]
    weights: Mapping[str, torch.Tensor]
    streams: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """A loss that is a sum over tokens, so that it can be split over rows and ranks in any way."""

    @property
    def components(self) -> tuple[str, ...]:
        """Weight streams it reads; each is divided by its own global count of trainable tokens."""
        ...

    def __call__(
        self, hidden_TD: torch.Tensor, head: Head, batch: DeviceBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of one row.

        Args:
            hidden_TD: output of the last block and final norm.
            head: projection to logits.
            batch: the row.
            denominators: per component the global count of trainable tokens of the whole update.

        Returns:
            The row's share of the loss (scalar, float32: the sum over all rows and ranks is the loss), and
            detached sums to report, by name; `loss` among them.
        """
        ...
