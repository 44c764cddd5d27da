"""What both ends of a broadcast of weights agree on: buckets, the meeting in a store, the group.

Sender (rank 0) and receivers meet in a TCP store of the sender. For every broadcast each receiver says under
`here_key` which group it has kept and on which device it computes; the sender answers all under `go_key` with
the group to use, a kept one or a new one. So a broadcast costs no new group, and an end that was started
again is noticed before anything is sent; the sender deletes both keys once every receiver has loaded the
version. The group is apart from torch's default group, which a trainer has for itself. torch is imported when
a group is formed.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from contract.policy import TensorInfo

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Backend = Literal["gloo", "nccl"]

DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element of the types that weights may have, by torch's name."""

_CPU = "cpu"
_SLICE = "a MIG slice of GPU "

_POLL_SECONDS = 0.001
_CHECK_SECONDS = 0.25
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class Here(msgspec.Struct, frozen=True):
    """A receiver is ready.

    Attributes:
        kept: number of the group that it still has; 0 is none.
        device: as `name_device` names it.
    """

    kept: int
    device: str


class Go(msgspec.Struct, frozen=True):
    """The sender's answer.

    Attributes:
        group: number of the group to use; 0: the broadcast does not take place.
    """

    group: int
    backend: Backend


def here_key(number: int, rank: int) -> str:
    """Where the receiver `rank` says `Here` for broadcast `number`."""
    return f"{number}/here/{rank}"


def go_key(number: int) -> str:
    """Where the sender says `Go` for broadcast `number`."""
    return f"{number}/go"


def name_device(device: torch.device) -> str:
    """What a process computes on: a CPU, or the UUID of its GPU, which is the same in every process."""
    import torch

    if device.type != "cuda":
        return _CPU
    properties = torch.cuda.get_device_properties(device)
    return f"{_SLICE if ' MIG ' in properties.name else ''}{properties.uuid}"


def can_use_nccl(devices: Sequence[str]) -> bool:
    """Whether nccl can join processes on these devices: it takes no CPU, no GPU twice, and all MIG slices of
    a GPU for one and the same.
    """
    are_gpus = not any(name == _CPU or name.startswith(_SLICE) for name in devices)
    return are_gpus and len(set(devices)) == len(devices)


def num_bytes(tensor: TensorInfo) -> int:
    """Bytes of a tensor on the way; KeyError if its type is none of `DTYPE_BYTES`."""
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of a tensor in its bucket, in bytes."""

    tensor: TensorInfo
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel as one buffer, without gaps between them."""

    slots: tuple[Slot, ...]

    @property
    def num_bytes(self) -> int:
        """Length of the buffer."""
        return self.slots[-1].stop


def cut(tensors: Sequence[TensorInfo], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most `bucket_bytes`, in order; a larger tensor is alone in its bucket.

    Where tensors come in descending order of element size, each starts at a multiple of it.
    """
    buckets: list[list[Slot]] = []
    for tensor in tensors:
        size = num_bytes(tensor)
        start = buckets[-1][-1].stop if buckets else 0
        if not buckets or start + size > bucket_bytes:
            buckets.append([])
            start = 0
        buckets[-1].append(Slot(tensor, start, start + size))
    return [Bucket(tuple(slots)) for slots in buckets]


def view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The tensor in the buffer `flat` (uint8) of its bucket; shares its memory."""
    import torch

    dtype = getattr(torch, slot.tensor.dtype)
    return flat[slot.start : slot.stop].view(dtype).view(slot.tensor.shape)


def no_check() -> None:
    """For a wait that nothing but its end or its time limit ends."""


class Group:
    """The processes of a broadcast.

    Args:
        number: among the groups of the sender, from 1.
        address: of this process, to which the others connect (gloo).
        device: of this process (nccl).
        timeout_seconds: longest wait until all are there.
        check: called several times a second while this waits for nccl, which does not notice that a peer is
            lost; raises where there is nothing to wait for. gloo notices by itself.

    Raises:
        RuntimeError: they do not all come in time.
    """

    def __init__(
        self,
        store: dist.Store,
        number: int,
        backend: Backend,
        rank: int,
        world_size: int,
        *,
        address: str,
        device: torch.device,
        timeout_seconds: float,
        check: Callable[[], None] = no_check,
    ) -> None:
        import torch.distributed as dist

        self.number = number
        self.backend: Backend = backend
        own = dist.PrefixStore(f"group/{number}", store)
        self._group: Any
        if backend == "nccl":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_seconds)
            with _without_watchdog():
                self._group = dist.ProcessGroupNCCL(own, rank, world_size, options)
            self._connect(device, timeout_seconds, check)
        else:
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=timeout_seconds)
            options._threads = 1
            self._group = dist.ProcessGroupGloo(own, rank, world_size, options)

    def broadcast(
        self, flat: torch.Tensor, timeout_seconds: float, check: Callable[[], None] = no_check
    ) -> None:
        """Fill `flat` on every rank with what it holds on rank 0.

        Args:
            check: see the class.

        Raises:
            RuntimeError: a peer is lost, or too slow; the group is of no use any more.
        """
        self._finish(self._begin(flat, timeout_seconds), timeout_seconds, check)

    def close(self) -> None:
        """Leave; with gloo the others notice at once if they wait for this process."""
        # gloo closes its connections when nobody holds the group any more.
        group, self._group = self._group, None
        if group is not None and self.backend == "nccl":
            group.abort()

    def _connect(self, device: torch.device, timeout_seconds: float, check: Callable[[], None]) -> None:
        """Let nccl connect the ranks, as it does with their first broadcast."""
        import torch

        deadline = time.monotonic() + timeout_seconds
        flat = torch.zeros(1, dtype=torch.uint8, device=device)
        begun: Future[Any] = Future()

        def begin() -> None:
            try:
                begun.set_result(self._begin(flat, timeout_seconds))
            except BaseException as error:
                begun.set_exception(error)

        # nccl waits without a limit until all are there, and cannot be told to stop: a thread that is left
        # behind with it.
        threading.Thread(target=begin, name="connect", daemon=True).start()
        wait_until(begun.done, timeout_seconds, check)
        if begun.exception() is not None:
            self.close()
        self._finish(begun.result(), deadline - time.monotonic(), check)

    def _begin(self, flat: torch.Tensor, timeout_seconds: float) -> Any:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(timeout_seconds, 0.001))
        return self._group.broadcast([flat], options)

    def _finish(self, work: Any, timeout_seconds: float, check: Callable[[], None]) -> None:
        if self.backend == "nccl":
            try:
                wait_until(work.is_completed, timeout_seconds, check)
            except BaseException:
                # What was begun would stay on the GPU for ever.
                self.close()
                raise
        work.wait()


def wait_until(is_done: Callable[[], bool], timeout_seconds: float, check: Callable[[], None]) -> None:
    """Wait, and call `check` several times a second.

    Raises:
        RuntimeError: it is not done in time.
    """
    now = time.monotonic()
    deadline, checked_at = now + timeout_seconds, now
    while not is_done():
        now = time.monotonic()
        if now > deadline:
            raise RuntimeError("timed out")
        if now - checked_at > _CHECK_SECONDS:
            check()
            checked_at = now
        time.sleep(_POLL_SECONDS)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make a group of nccl over which torch sets no thread that ends the whole process when a peer is lost:
    here that is an error like others, and a policy server outlives its trainer. torch reads this from the
    environment alone, when the group is made.
    """
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def reason_of(error: BaseException) -> str:
    """Why a group or a store has failed. Their own texts name files and lines of their source."""
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return "no answer in time"
    if any(word in text for word in ("closed by peer", "reset by peer", "broken pipe", "0 bytes")):
        return "the connection broke"
    if "refused" in text or "failed to connect" in text:
        return "nobody listens there"
    if "nccl error" in text:
        return "nccl failed; with NCCL_DEBUG=WARN in the environment it says why"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def own_address(host: str, port: int) -> str:
    """Address under which this machine is known on the way to `host`.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Nothing is sent: connecting a datagram socket only chooses the route.
        probe.connect(address)
        return str(probe.getsockname()[0])
