"""Parts and storage that do what the test says, and a process around the group that a test runs in."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contract.commit import scan
from contract.errors import CheckpointError
from contract.layout import RunFolder
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.storage import COMPONENT, LocalStorage
from trainer.checkpoint.tensor_writer import LocalFiles, TensorWriter, WritableFile
from trainer.config.checkpoint import CheckpointConfig
from trainer.hold import Hold
from trainer.parallel.device import Device
from trainer.parallel.layout import LogicalTensor, Placement, Region, Residence, local_part
from trainer.parallel.process import Process, open_process


class FakePart:
    """Holds tensors and values; `tensors_to_load` asks for exactly its own tensors.

    Args:
        tensors: DTensors, or tensors that every rank holds whole.
        packed: names of tensors that are several logical ones, and their regions.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Any] | None = None,
        *,
        residence: Residence = "device",
        packed: Mapping[str, tuple[Region, ...]] | None = None,
    ) -> None:
        self.held = dict(tensors)
        self.held_values = dict(values or {})
        self._residence: Residence = residence
        self._packed = dict(packed or {})

    def tensors(self) -> dict[str, LogicalTensor]:
        found: dict[str, LogicalTensor] = {}
        for name, tensor in self.held.items():
            placement = Placement.of(name, tensor, self._packed.get(name, ()))
            found |= placement.logical(local_part(tensor), self._residence)
        return found

    def values(self) -> dict[str, Any]:
        return self.held_values

    def tensors_to_load(self, names: Collection[str]) -> dict[str, LogicalTensor]:
        tensors = self.tensors()
        missing = sorted(set(tensors) - set(names))
        if missing:
            raise CheckpointError(f"tensor {missing[0]} is missing")
        return tensors

    def loaded(self, values: Mapping[str, Any]) -> None:
        self.held_values = dict(values)


class FakeOwner:
    """Changes host tensors in place, as the update of an optimizer does.

    Args:
        obeys: whether it waits for the hold before it does so.
    """

    def __init__(self, tensors: Collection[torch.Tensor], *, obeys: bool = True) -> None:
        self._tensors = [local_part(tensor) for tensor in tensors]
        self._obeys = obeys
        self.hold: Hold | None = None

    def hold_state_updates(self, hold: Hold) -> None:
        self.hold = hold

    def update(self) -> None:
        for tensor in self._tensors:
            if self._obeys and self.hold is not None:
                self.hold.wait([tensor])
            tensor.add_(1.0)


class Gate:
    """Lets writes through to the disk, or makes them wait or fail.

    `passed` bytes go through before the gate does what it was told to.
    """

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.error: OSError | None = None
        self.passed = 0
        self.seconds_per_write = 0.0

    def close(self, passed: int = 0) -> None:
        """From now on writes wait after `passed` bytes."""
        self.passed = passed
        self.reached.clear()
        self.open.clear()

    def pass_through(self, num_bytes: int) -> None:
        time.sleep(self.seconds_per_write)
        if self.passed >= num_bytes:
            self.passed -= num_bytes
            return
        if not self.open.is_set():
            self.reached.set()
            self.open.wait()
        if self.error is not None:
            raise self.error


class _GatedFile:
    def __init__(self, file: WritableFile, gate: Gate) -> None:
        self._file = file
        self._gate = gate

    def write(self, data: memoryview) -> int:
        self._gate.pass_through(len(data))
        return self._file.write(data)


class _GatedFiles(LocalFiles):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    @contextmanager
    def create(self, path: Any) -> Iterator[Any]:
        with super().create(path) as file:
            yield _GatedFile(file, self._gate)


class GatedStorage(LocalStorage):
    """A local storage whose tensor files go through a gate."""

    def __init__(self, checkpoints: Path, gate: Gate) -> None:
        super().__init__(checkpoints)
        self._checkpoints_folder = checkpoints
        self._gate = gate

    def tensor_writer(self, step: int, *, threads: int, checksums: bool) -> TensorWriter:
        return TensorWriter(
            self._checkpoints_folder / f"step_{step}.partial" / COMPONENT,
            _GatedFiles(self._gate),
            folder_name=COMPONENT,
            threads=threads,
            checksums=checksums,
        )


def simple_parts() -> dict[str, FakePart]:
    """A weight on the device, and state on the host."""
    return {
        "model": FakePart({"w": torch.ones(40)}),
        "optimizer": FakePart({"m": torch.ones(40)}, residence="host"),
    }


@contextmanager
def single_process() -> Iterator[Process]:
    """A group of one in this process, on the CPU."""
    with open_process("cpu", num_threads=None, timeout_seconds=60) as process:
        yield process


def process_of_rank(write_timeout_seconds: float = 30.0, timeout_seconds: float = 30.0) -> Process:
    """The process of a rank that `run_ranks` started; the limits are those of its groups."""
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    background_timeout = timedelta(seconds=write_timeout_seconds)
    background = dist.new_group(backend="gloo", timeout=background_timeout)
    assert isinstance(control, dist.ProcessGroup) and isinstance(background, dist.ProcessGroup)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = Device(torch.device("cpu"))
    return Process(
        rank,
        rank,
        world_size,
        world_size,
        device,
        timedelta(seconds=timeout_seconds),
        control,
        background,
        background_timeout,
    )


def open_async(
    process: Process,
    folder: RunFolder,
    parts: Mapping[str, FakePart],
    gate: Gate,
    *owners: FakeOwner,
    **settings: Any,
) -> CheckpointManager:
    """A manager that saves behind the step, through `gate`."""
    return CheckpointManager(
        CheckpointConfig(async_save=True, **settings),
        folder,
        process,
        parts,
        {},
        state_owners=owners,
        is_state_on_host=True,
        storage=GatedStorage(folder.checkpoints, gate),
    )


def committed(folder: RunFolder) -> list[int]:
    return [entry.step for entry in scan(folder.checkpoints) if entry.state == "committed"]
