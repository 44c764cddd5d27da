"""What a checkpoint is made of: named parts, each with tensors and JSON values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Part(Protocol):
    """One piece of the training state (`model`, `optimizer`, `schedule`, `progress`, `data`, `tracker`).

    Tensors are DTensors or plain tensors; a plain tensor is equal on all ranks. Names are unique inside the
    part and equal on all ranks, whatever the world size. The writer stores a tensor under `<part>.<name>`.
    """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors to save, by reference."""
        ...

    def values(self) -> dict[str, Any]:
        """JSON values to save; equal on all ranks."""
        ...

    def tensors_to_load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Tensors that the reader fills in place, out of the `names` that the checkpoint holds; allocates if
        needed.

        Raises:
            CheckpointError: a tensor that this part cannot do without is not among `names`.
        """
        ...

    def loaded(self, values: Mapping[str, Any]) -> None:
        """Take over `values`, after the tensors were filled."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one save writes: nothing in here may change until the write is over.

    Attributes:
        tensors: by `<part>.<name>`; also `rng.rank_K`, which only rank K has.
        values: JSON values of each part.
        config: the resolved configuration, JSON values.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Any]


def part_tensors(parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
    """The tensors of all parts, by `<part>.<name>`, by reference."""
    return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.tensors().items()}


def take_snapshot(
    step: int, parts: Mapping[str, Part], rng: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Snapshot:
    """The state of all parts, by reference: the caller does not train on until it is written."""
    return Snapshot(
        step, {**part_tensors(parts), **rng}, {name: part.values() for name, part in parts.items()}, config
    )


def count_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the tensors over all ranks (a DTensor counts whole; a plain tensor once)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
