"""A part that holds what the test says, and a process around the group that a test runs in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from contract.errors import CheckpointError
from trainer.parallel.device import Device
from trainer.parallel.process import Process, open_process


class FakePart:
    """Holds tensors and values; `tensors_to_load` asks for exactly its own tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any] | None = None) -> None:
        self.held = dict(tensors)
        self.held_values = dict(values or {})

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.held)

    def values(self) -> dict[str, Any]:
        return dict(self.held_values)

    def tensors_to_load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        missing = sorted(set(self.held) - set(names))
        if missing:
            raise CheckpointError(f"tensor {missing[0]} is missing")
        return self.tensors()

    def loaded(self, values: Mapping[str, Any]) -> None:
        self.held_values = dict(values)


@contextmanager
def single_process() -> Iterator[Process]:
    """A group of one in this process, on the CPU."""
    with open_process("cpu", num_threads=None, timeout_seconds=60) as process:
        yield process


def process_of_rank() -> Process:
    """The process of a rank that `run_ranks` started."""
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=30)) for _ in range(2)]
    control, background = groups
    assert isinstance(control, dist.ProcessGroup) and isinstance(background, dist.ProcessGroup)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = Device(torch.device("cpu"))
    return Process(rank, rank, world_size, world_size, device, timedelta(seconds=30), control, background)
