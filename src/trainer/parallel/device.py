"""The one place that knows kinds of devices. CPU and CUDA differ here and nowhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from contract.errors import ConfigError


class Mark:
    """A point in the work of a side stream."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def join(self) -> None:
        """Let the current stream go on only after this point; the host does not wait."""
        if self._event is not None:
            self._event.wait()

    def finish(self) -> None:
        """Let the host wait for this point."""
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """Work of the device that runs beside its current stream, in order in itself.

    A device that works in step with the host (a CPU) does everything at once: there is nothing to wait for.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @contextmanager
    def queue(self, *, after_current: bool = True) -> Iterator[None]:
        """What is queued inside runs here, after all that the current stream was given before.

        Args:
            after_current: false does not wait for the current stream: nothing there may concern the memory.
        """
        if self._stream is None:
            yield
            return
        if after_current:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, tensor: torch.Tensor) -> None:
        """Let the memory of `tensor`, which another stream gave, not be used again before what was queued
        here is done, though nobody refers to it any more.
        """
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def mark(self) -> Mark:
        """The end of all that was queued so far."""
        if self._stream is None:
            return Mark(None)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)

    def finish(self) -> None:
        """Let the host wait until all that was queued is done."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class Device:
    """The device of this process, and what follows from its kind."""

    torch_device: torch.device

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`."""
        return self.torch_device.type

    @property
    def backend(self) -> str:
        """Process-group backend; CPU tensors can always be reduced."""
        return "cpu:gloo,cuda:nccl" if self.kind == "cuda" else "gloo"

    @property
    def name(self) -> str:
        """Name of the hardware."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        return f"CPU ({torch.get_num_threads()} threads)"

    def compute_dtype(self, setting: str) -> torch.dtype:
        """Type of forward and backward for `model.compute_dtype`."""
        if setting == "auto":
            return torch.bfloat16 if self.kind == "cuda" else torch.float32
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[setting]

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for copies from and to this device, not filled; pinned where that makes copies
        asynchronous.
        """
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.kind == "cuda")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device, not filled."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """`array` on the device (on a CPU, the same memory). The host goes on at once; from memory that is
        not pinned it would first wait for all that the device was given before.
        """
        tensor = torch.from_numpy(array)
        if self.kind == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.torch_device, non_blocking=True)

    def side_stream(self) -> SideStream:
        """A new stream beside the current one."""
        return SideStream(torch.cuda.Stream(self.torch_device) if self.kind == "cuda" else None)

    def synchronize(self) -> None:
        """Wait for the device, so that a host clock measures its work."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def peak_memory_bytes(self) -> int | None:
        """Most device memory allocated since the start; None where the device's memory is the host's."""
        return torch.cuda.max_memory_allocated(self.torch_device) if self.kind == "cuda" else None

    def total_memory_bytes(self) -> int | None:
        """Memory of the device; None where it is the host's."""
        return (
            torch.cuda.get_device_properties(self.torch_device).total_memory if self.kind == "cuda" else None
        )

    def rng_state(self) -> torch.Tensor | None:
        """State of the device's own generator, or None if it has none beside the host's."""
        return torch.cuda.get_rng_state(self.torch_device) if self.kind == "cuda" else None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore `rng_state`."""
        if self.kind == "cuda":
            torch.cuda.set_rng_state(state, self.torch_device)

    def measure_peak_tflops(self, dtype: torch.dtype, *, size: int = 1536, seconds: float = 1.0) -> float:
        """TFLOP/s of a square matrix product in `dtype`: what this device can reach, for MFU.

        Best of several runs, because other work on the machine only ever slows one down.
        """
        left = torch.randn(size, size, dtype=dtype, device=self.torch_device)
        right = torch.randn(size, size, dtype=dtype, device=self.torch_device)
        torch.mm(left, right)
        best, end = 0.0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.synchronize()
            start = time.perf_counter()
            torch.mm(left, right)
            self.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
        return best / 1e12


def open_device(setting: str, local_rank: int, num_threads: int | None, local_world_size: int) -> Device:
    """The device for `deployment.device` on this rank; sets the CPU threads of the process.

    Raises:
        ConfigError: CUDA is asked for and missing, or there are fewer GPUs than processes.
    """
    torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // local_world_size))
    available = torch.cuda.is_available()
    if setting == "cpu" or (setting == "auto" and not available):
        return Device(torch.device("cpu"))
    if not available:
        raise ConfigError(
            "deployment.device = 'cuda', but torch finds no usable GPU; use deployment.device = 'auto' or "
            "'cpu'"
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"deployment.num_processes = {local_world_size} asks for one GPU per process, but this machine "
            f"shows "
            f"{torch.cuda.device_count()}; lower it"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return Device(device)
