"""Host memory that a background write still reads, and when its owner may change it.

A save hands host-resident state to its writer by reference. The writer reads it piece by piece; the owner (an
optimizer) asks before it changes anything in place, and waits for just the pieces that it is about to
change. Where a buffer is given, a piece that was not read yet is copied aside instead and the owner goes on
at once.

Both sides only know memory: pieces and questions are compared by address, so an owner may hold its state in
slabs and ask for any part of them.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from contract.errors import CheckpointError

_State = Literal["waiting", "copying", "copied", "reading", "read"]


class AsideBuffer:
    """Memory for copies of held pieces, allocated once and used again by every save.

    Args:
        num_bytes: most that copies may take; 0 copies nothing.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory: torch.Tensor | None = None
        self._used = 0

    def clear(self) -> None:
        """Give all room back: no copy is needed any more."""
        self._used = 0

    def take(self, like: torch.Tensor) -> torch.Tensor | None:
        """Room for a copy of `like`, not filled; None if it does not fit any more."""
        start = -(-self._used // 64) * 64
        if start + like.nbytes > self._num_bytes:
            return None
        if self._memory is None:
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8)
        self._used = start + like.nbytes
        return self._memory[start : self._used].view(like.dtype).view(like.shape)


@dataclass(slots=True)
class _Held:
    start: int
    stop: int
    source: torch.Tensor
    state: _State = "waiting"


@dataclass(slots=True)
class HoldStatistics:
    """What the hold of one save has cost its owners: seconds they waited, and bytes that were copied
    aside.
    """

    wait_seconds: float = 0.0
    copied_bytes: int = 0


class Hold:
    """The pieces of host memory that one save reads by reference.

    Args:
        pieces: disjoint, contiguous host tensors, in the order in which they will be read.
        buffer: for copies; None copies nothing.
        timeout_seconds: longest wait for the writer.
    """

    def __init__(
        self, pieces: Iterable[torch.Tensor], *, buffer: AsideBuffer | None, timeout_seconds: float
    ) -> None:
        held = sorted(
            (_Held(*_span(piece), piece) for piece in pieces if piece.numel()), key=lambda h: h.start
        )
        assert all(left.stop <= right.start for left, right in zip(held, held[1:], strict=False))
        self._held = held
        self._starts = [item.start for item in held]
        self._buffer = buffer
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._is_over = False
        self.statistics = HoldStatistics()

    @property
    def is_over(self) -> bool:
        """Whether the write has ended, so that nothing is held any more."""
        return self._is_over

    def covers(self, piece: torch.Tensor) -> bool:
        """Whether `piece` is one of the held ones."""
        if piece.device.type != "cpu" or not piece.numel():
            return False
        index = bisect.bisect_left(self._starts, piece.data_ptr())
        return index < len(self._starts) and self._starts[index] == piece.data_ptr()

    def begin_read(self, piece: torch.Tensor) -> torch.Tensor:
        """Called by the writer: the memory to read `piece` from, which does not change until `end_read`."""
        held = self._find(piece)
        with self._changed:
            self._changed.wait_for(lambda: held.state != "copying")
            if held.state == "waiting":
                held.state = "reading"
            return held.source

    def end_read(self, piece: torch.Tensor) -> None:
        """Called by the writer: `piece` is not needed any more."""
        held = self._find(piece)
        with self._changed:
            held.state = "read"
            self._changed.notify_all()

    def finish(self) -> None:
        """Called by the writer when it has ended, however it ended: nothing is held any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Called by an owner: return when it may change all of `tensors` in place.

        Raises:
            CheckpointError: the writer did not let them go in time.
        """
        start = time.perf_counter()
        for tensor in tensors:
            if self._is_over:
                break
            for held in self._overlapping(tensor):
                self._release(held)
        with self._changed:
            self.statistics.wait_seconds += time.perf_counter() - start

    def _release(self, held: _Held) -> None:
        with self._changed:
            if held.state == "waiting" and not self._is_over:
                copy = self._buffer.take(held.source) if self._buffer is not None else None
                if copy is not None:
                    held.state = "copying"
            else:
                copy = None
        if copy is not None:
            copy.copy_(held.source)
            with self._changed:
                held.source, held.state = copy, "copied"
                self.statistics.copied_bytes += copy.nbytes
                self._changed.notify_all()
            return
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._is_over or held.state in ("copied", "read"), self._timeout_seconds
            )
        if not done:
            raise CheckpointError(
                f"the checkpoint that is being written did not let the optimizer's state go within "
                f"{self._timeout_seconds:g} s: the storage hangs or is too slow; raise "
                f"ckpt.write_timeout_seconds, or "
                f"see to the storage"
            )

    def _overlapping(self, tensor: torch.Tensor) -> list[_Held]:
        if not tensor.numel():
            return []
        start, stop = _span(tensor)
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        last = bisect.bisect_left(self._starts, stop)
        return [held for held in self._held[first:last] if held.stop > start]

    def _find(self, piece: torch.Tensor) -> _Held:
        held = self._held[bisect.bisect_left(self._starts, piece.data_ptr())]
        assert held.start == piece.data_ptr(), "not a piece of this hold"
        return held


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
