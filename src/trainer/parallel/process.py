"""This process among its peers: rank, device, process groups, and decisions that all ranks take together.

Every group has a time limit: a gloo peer of a dead process would otherwise wait for hours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.parallel.device import Device, open_device

_T = TypeVar("_T")


@dataclass(slots=True)
class Process:
    """One rank.

    Attributes:
        timeout: of the collectives of training, and of the control group.
        control_group: gloo group for small host-side decisions of the training thread.
        background_group: gloo group that only background writes and their decisions use, so that they never
            meet a collective of the training step.
        background_timeout: of the collectives of the background group.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: Device
    timeout: timedelta
    control_group: dist.ProcessGroup = field(repr=False)
    background_group: dist.ProcessGroup = field(repr=False)
    background_timeout: timedelta

    @property
    def is_main(self) -> bool:
        """Whether this rank prints, and writes the files that exist once."""
        return self.rank == 0

    def all_sum(self, values: list[float]) -> list[float]:
        """Sum of each value over ranks, in float64: exact for counts up to 2**53."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control_group)
        return tensor.tolist()

    def all_max(self, value: float) -> float:
        """Greatest value over ranks; how one rank's signal becomes a decision of all."""
        return self.all_max_each([value])[0]

    def all_max_each(self, values: list[float]) -> list[float]:
        """Greatest of each value over ranks, in one collective."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control_group)
        return tensor.tolist()

    def gather(self, value: _T) -> list[_T] | None:
        """`value` of every rank in order of rank, on rank 0; None elsewhere. Goes through pickle."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self.control_group)
        return values

    def share(self, kind: int, content: bytes) -> tuple[int, bytes]:
        """The arguments of rank 0, on every rank; those of the others do not matter."""
        if self.world_size == 1:
            return kind, content
        header = torch.tensor([kind, len(content)], dtype=torch.int64)
        dist.broadcast(header, src=0, group=self.control_group)
        kind, size = header.tolist()
        if size == 0:
            return kind, b""
        # A copy, because the memory of `bytes` may not be written to.
        data = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if self.is_main
            else torch.empty(size, dtype=torch.uint8)
        )
        dist.broadcast(data, src=0, group=self.control_group)
        return kind, data.numpy().tobytes()

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control_group)

    def renew_background_group(self) -> None:
        """Put a new group in place of the background group, which no rank may be using: a gloo group in which
        one collective has timed out fails for ever. Every rank calls this, where it also makes other groups.

        Raises:
            RuntimeError: a rank is lost.
        """
        before, self.background_group = self.background_group, _new_group(self.background_timeout)
        dist.destroy_process_group(before)


@contextmanager
def open_process(
    device: str,
    *,
    num_threads: int | None,
    timeout_seconds: float,
    write_timeout_seconds: float | None = None,
) -> Iterator[Process]:
    """Join the process group that torchrun describes in the environment, or form a group of one without it.

    Args:
        device: `auto`, `cpu` or `cuda`.
        num_threads: CPU threads of this process; None divides the cores among the machine's processes.
        timeout_seconds: longest wait for a peer in a collective.
        write_timeout_seconds: longest write of a checkpoint. In the background group, where a wait spans a
            peer's write, a wait may take twice as long: whoever watches the write gives it up first, and says
            more. None: nothing is written.

    Raises:
        ConfigError: the device does not exist.
    """
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    own_device = open_device(device, local_rank, num_threads, local_world_size)
    timeout = timedelta(seconds=timeout_seconds)
    background_timeout = timedelta(seconds=2 * (write_timeout_seconds or timeout_seconds))
    if world_size == 1:
        # A store inside the process: a run of one needs no port and no file.
        dist.init_process_group(
            own_device.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    else:
        dist.init_process_group(own_device.backend, timeout=timeout)
    try:
        control_group = _new_group(timeout)
        background_group = _new_group(background_timeout)
        yield Process(
            rank,
            local_rank,
            world_size,
            local_world_size,
            own_device,
            timeout,
            control_group,
            background_group,
            background_timeout,
        )
    finally:
        dist.destroy_process_group()


def _new_group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
