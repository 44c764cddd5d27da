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
    """One span of memory.

    Attributes:
        source: where the writer reads it: itself, or the copy.
        num_unread: reads that have not ended; more than one where several tensors of the checkpoint are the
            same memory.
    """

    start: int
    stop: int
    source: torch.Tensor
    num_unread: int = 1
    state: _State = "waiting"


@dataclass(slots=True)
class HoldStatistics:
    """What the hold of one save has cost the owners on this rank: seconds they waited, and bytes that were
    copied aside.
    """

    wait_seconds: float = 0.0
    copied_bytes: int = 0


class Hold:
    """The pieces of host memory that one save reads by reference.

    Args:
        pieces: contiguous host tensors, any two disjoint or the very same memory.
        buffer: for copies; None copies nothing.
        timeout_seconds: longest wait for the writer, in all waits together.
        on_timeout: what an owner does then: `raise`, or `give_up` the write and go on.
    """

    def __init__(
        self,
        pieces: Iterable[torch.Tensor],
        *,
        buffer: AsideBuffer | None,
        timeout_seconds: float,
        on_timeout: Literal["raise", "give_up"] = "raise",
    ) -> None:
        self._held: list[_Held] = []
        for piece in sorted((piece for piece in pieces if piece.numel()), key=torch.Tensor.data_ptr):
            start, stop = _span(piece)
            last = self._held[-1] if self._held else None
            if last is not None and (last.start, last.stop) == (start, stop):
                last.num_unread += 1
            else:
                assert last is None or last.stop <= start, "pieces overlap"
                self._held.append(_Held(start, stop, piece))
        self._starts = [held.start for held in self._held]
        self._buffer = buffer
        self._timeout_seconds = timeout_seconds
        self._on_timeout = on_timeout
        self._changed = threading.Condition()
        self._is_over = False
        self._was_given_up = False
        self.statistics = HoldStatistics()

    @property
    def is_over(self) -> bool:
        """Whether nothing is held any more."""
        return self._is_over

    @property
    def was_given_up(self) -> bool:
        """Whether owners went on without the writer, which may have read what they changed: its write must
        fail.
        """
        return self._was_given_up

    def covers(self, piece: torch.Tensor) -> bool:
        """Whether `piece` is one of the held ones."""
        if piece.device.type != "cpu" or not piece.numel():
            return False
        index = bisect.bisect_left(self._starts, piece.data_ptr())
        return index < len(self._starts) and self._starts[index] == piece.data_ptr()

    def begin_read(self, piece: torch.Tensor) -> torch.Tensor:
        """Called by the writer: memory with the content of `piece`, unchanged until `end_read`."""
        held = self._find(piece)
        with self._changed:
            self._changed.wait_for(lambda: held.state != "copying")
            if held.state == "waiting":
                held.state = "reading"
            return held.source.view(piece.dtype).view(piece.shape)

    def end_read(self, piece: torch.Tensor) -> None:
        """Called by the writer, once for every piece: it is not needed any more."""
        held = self._find(piece)
        with self._changed:
            held.num_unread -= 1
            if held.num_unread == 0:
                held.state = "read"
                self._changed.notify_all()

    def finish(self) -> None:
        """Called by the writer when it has ended, however it ended: nothing is held any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """Called by the side of the owners: hold nothing any more, though the writer may still read."""
        with self._changed:
            # A write that has ended was not disturbed.
            self._was_given_up = self._was_given_up or not self._is_over
            self._is_over = True
            self._changed.notify_all()

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Called by an owner: return when it may change all of `tensors` in place.

        Raises:
            CheckpointError: the writer did not let them go in time, and `on_timeout` is "raise".
        """
        if self._is_over:
            return
        start = time.perf_counter()
        asked = [held for tensor in tensors for held in self._overlapping(tensor)]
        # All copies before the first wait: while an owner waits for the piece that is being read, the writer
        # would begin to read the next one, and there would never be one to copy.
        for held in asked:
            self._copy_aside(held)
        for held in asked:
            self._wait_for(held, start + self._timeout_seconds - self.statistics.wait_seconds)
        with self._changed:
            self.statistics.wait_seconds += time.perf_counter() - start

    def is_aside(self, piece: torch.Tensor) -> bool:
        """Whether nobody waits for `piece` any more, as there is a copy of it: others should be read
        first.
        """
        return self._find(piece).state == "copied"

    def _copy_aside(self, held: _Held) -> None:
        with self._changed:
            if held.state != "waiting" or self._is_over or self._buffer is None:
                return
            copy = self._buffer.take(held.source)
            if copy is None:
                return
            held.state = "copying"
        copy.copy_(held.source)
        with self._changed:
            held.source, held.state = copy, "copied"
            self.statistics.copied_bytes += copy.nbytes
            self._changed.notify_all()

    def _wait_for(self, held: _Held, deadline: float) -> None:
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: self._is_over or held.state in ("copied", "read"), deadline - time.perf_counter()
            )
        if not is_free:
            self.give_up()
            if self._on_timeout == "raise":
                raise CheckpointError(
                    f"the checkpoint that is being written did not let the optimizer's state go within "
                    f"{self._timeout_seconds:g} s: the storage hangs or is too slow; see to the storage, or "
                    f"raise ckpt.write_timeout_seconds (with several ranks, at most half of "
                    f"deployment.collective_timeout_seconds is waited)"
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
        assert (held.start, held.stop) == _span(piece), "not a piece of this hold"
        return held


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
