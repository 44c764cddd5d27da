"""What a checkpoint is made of: named parts, each with tensors and JSON values; and the state of other
processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer.hold import Hold
from trainer.parallel.layout import LogicalTensor


class Part(Protocol):
    """One piece of the training state (`model`, `optimizer`, `schedule`, `progress`, `data`, `tracker`).

    Names of tensors are unique inside the part and equal on all ranks, whatever the world size and the
    layout of the run. The writer stores a tensor under `<part>.<name>`.
    """

    def tensors(self) -> dict[str, LogicalTensor]:
        """This rank's share of the tensors to save, as views: building the list copies and communicates
        nothing. What several ranks hold (replicas) is equal on all of them: one of them writes it.
        """
        ...

    def values(self) -> dict[str, Any]:
        """JSON values to save; equal on all ranks."""
        ...

    def tensors_to_load(self, names: Collection[str]) -> dict[str, LogicalTensor]:
        """Tensors that the reader fills in place, out of the `names` that the checkpoint holds; allocates if
        needed.

        Raises:
            CheckpointError: a tensor that this part cannot do without is not among `names`.
        """
        ...

    def loaded(self, values: Mapping[str, Any]) -> None:
        """Take over `values`, after the tensors were filled."""
        ...


class Companion(Protocol):
    """State of another process that lies in the same commit, in a folder of its own (a *component* of the
    step). What is in it is that process's business.
    """

    def content(self) -> bytes:
        """JSON that belongs to the state of training as it is now; equal on all ranks."""
        ...

    def loaded(self, content: bytes) -> None:
        """The run goes on from a step that holds `content`."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one save writes: nothing in here may change until the write is over, but for what `hold` watches.

    Attributes:
        tensors: by `<part>.<name>`, in the order in which they are written; also `rng.rank_K`, which only
            rank K has.
        values: JSON values of each part.
        config: the resolved configuration, JSON values.
        hold: over the pieces whose owner may change them as soon as they are written; None where the
            training step waits for the whole write.
        companions: content of the state of every other process, by component.
    """

    step: int
    tensors: Mapping[str, LogicalTensor]
    values: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Any]
    hold: Hold | None = None
    companions: Mapping[str, bytes] = field(default_factory=dict)


def part_tensors(parts: Mapping[str, Part]) -> dict[str, LogicalTensor]:
    """The tensors of all parts, by `<part>.<name>`."""
    return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.tensors().items()}


def count_bytes(tensors: Mapping[str, LogicalTensor]) -> int:
    """Bytes of the tensors over all ranks."""
    return sum(tensor.num_bytes for tensor in tensors.values())
