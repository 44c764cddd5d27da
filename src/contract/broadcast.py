"""What both ends of a broadcast of weights agree on: buckets, the meeting in a store, the group.

Sender (rank 0) and receivers meet in a TCP store of the sender. For every broadcast each receiver says under
`here_key` which group it has kept and on which device it computes; the sender answers all under `go_key` with
the group to use, a kept one or a new one. So a broadcast costs no new group, and an end that was started
again is noticed before anything is sent. The group is apart from torch's default group, which a trainer has
for itself. torch is imported when a group is formed.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
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

CPU = "cpu"
"""Device of a receiver without a GPU; a GPU is named by its UUID."""

_POLL_SECONDS = 0.001


class Here(msgspec.Struct, frozen=True):
    """A receiver is ready.

    Attributes:
        kept: number of the group that it still has; 0 is none.
        device: `CPU`, or the UUID of its GPU.
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


class Group:
    """The processes of a broadcast.

    Args:
        number: among the groups of the sender, from 1.
        address: of this process, to which the others connect (gloo).
        timeout_seconds: longest wait until all are there.

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
        timeout_seconds: float,
    ) -> None:
        import torch.distributed as dist

        self.number = number
        self.backend: Backend = backend
        own = dist.PrefixStore(f"group/{number}", store)
        self._group: Any
        if backend == "nccl":
            options: Any = dist.ProcessGroupNCCL.Options()
            # nccl's own watchdog ends the process. It must not be faster than `broadcast`, which says why.
            options._timeout = timedelta(seconds=10 * timeout_seconds + 600)
            self._group = dist.ProcessGroupNCCL(own, rank, world_size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=timeout_seconds)
            options._threads = 1
            self._group = dist.ProcessGroupGloo(own, rank, world_size, options)

    def broadcast(self, flat: torch.Tensor, timeout_seconds: float) -> None:
        """Fill `flat` on every rank with what it holds on rank 0.

        Raises:
            RuntimeError: a peer is lost, or too slow; the group is of no use any more.
        """
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(timeout_seconds, 0.001))
        work = self._group.broadcast([flat], options)
        if self.backend == "nccl":
            deadline = time.monotonic() + timeout_seconds
            while not work.is_completed():
                if time.monotonic() > deadline:
                    self._group.abort()
                    raise RuntimeError("Operation timed out!")
                time.sleep(_POLL_SECONDS)
        work.wait()

    def close(self) -> None:
        """Leave; the others notice at once if they wait for this process."""
        # gloo closes its connections when nobody holds the group any more.
        self._group = None


def reason_of(error: BaseException) -> str:
    """Why a group or a store has failed. Their own texts name files and lines of their source."""
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return "no answer in time"
    if any(word in text for word in ("closed by peer", "reset by peer", "broken pipe", "0 bytes")):
        return "the connection broke"
    if "refused" in text or "failed to connect" in text:
        return "nobody listens there"
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
