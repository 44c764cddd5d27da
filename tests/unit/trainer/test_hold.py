"""The hold: owners wait for what is still to be read, and for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from contract.errors import CheckpointError
from trainer.hold import AsideBuffer, Hold

SECONDS = 30.0


class Owner:
    """Waits for tensors on a thread of its own."""

    def __init__(self, hold: Hold, tensors: Sequence[torch.Tensor]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(hold, tensors), daemon=True)
        self._thread.start()

    def _run(self, hold: Hold, tensors: Sequence[torch.Tensor]) -> None:
        try:
            hold.wait(tensors)
        except BaseException as error:
            self._error = error

    def is_waiting(self) -> bool:
        self._thread.join(0.1)
        return self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the owner still waits"
        if self._error is not None:
            raise self._error


def hold_of(*pieces: torch.Tensor, aside_bytes: int = 0, timeout_seconds: float = SECONDS) -> Hold:
    return Hold(pieces, buffer=AsideBuffer(aside_bytes), timeout_seconds=timeout_seconds)


def read(hold: Hold, piece: torch.Tensor) -> torch.Tensor:
    content = hold.begin_read(piece).clone()
    hold.end_read(piece)
    return content


def test_an_owner_waits_until_exactly_the_pieces_it_asks_for_are_read() -> None:
    first, second, third = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    hold = hold_of(first, second, third)
    owner = Owner(hold, [first, third])
    assert owner.is_waiting()
    read(hold, first)
    assert owner.is_waiting()
    hold.begin_read(third)
    assert owner.is_waiting()  # a piece that is being read is not free yet
    hold.end_read(third)
    owner.finish()
    assert Owner(hold, [second]).is_waiting()


def test_pieces_that_share_a_slab_are_told_apart_by_address() -> None:
    slab = torch.arange(100.0)
    pieces = [slab[start : start + 20] for start in range(0, 100, 20)]
    hold = hold_of(*pieces)
    for index in (1, 2, 4):
        read(hold, pieces[index])
    hold.wait([slab[20:60], slab[80:], slab[59:60], slab[100:]])
    for part in (slab[19:21], slab[60:61], slab[79:80], slab[10:90], slab):
        owner = Owner(hold, [part])
        assert owner.is_waiting(), part
    read(hold, pieces[3])
    hold.wait([slab[20:100]])
    with pytest.raises(AssertionError, match="not a piece"):
        hold.begin_read(slab[20:30])


def test_what_is_not_held_is_free_at_once() -> None:
    hold = hold_of(torch.zeros(4), torch.zeros(0), timeout_seconds=0.0)
    other = torch.zeros(4)
    hold.wait([other, torch.zeros(0)])
    assert not hold.covers(other) and not hold.covers(torch.zeros(0))


def test_memory_that_is_several_tensors_of_a_checkpoint_is_free_after_the_last_of_them() -> None:
    counter = torch.tensor(7.0)
    hold = hold_of(counter, counter.view(1), counter)
    assert torch.equal(read(hold, counter.view(1)), torch.tensor([7.0]))
    read(hold, counter)
    owner = Owner(hold, [counter])
    assert owner.is_waiting()
    read(hold, counter)
    owner.finish()


def test_what_fits_into_the_buffer_is_copied_aside_and_read_from_there() -> None:
    pieces = [torch.full((16,), float(index)) for index in range(4)]
    hold = hold_of(*pieces, aside_bytes=2 * 64)
    hold.begin_read(pieces[0])
    hold.wait([pieces[1], pieces[2]])  # nobody reads: only copies can let them go
    assert hold.statistics.copied_bytes == 128
    for piece in pieces[1:3]:
        piece.fill_(99.0)
    assert [float(read(hold, piece)[0]) for piece in pieces[1:3]] == [1.0, 2.0]
    assert Owner(hold, [pieces[3]]).is_waiting()  # the buffer is full
    assert Owner(hold, [pieces[0]]).is_waiting()  # and what is being read cannot be copied away any more


def test_an_owner_copies_all_it_asks_for_before_it_waits_for_the_piece_that_is_being_read() -> None:
    pieces = [torch.full((16,), float(index)) for index in range(4)]
    hold = hold_of(*pieces, aside_bytes=1024)
    hold.begin_read(pieces[0])
    owner = Owner(hold, pieces)
    assert owner.is_waiting()
    assert hold.statistics.copied_bytes == 3 * 64
    assert [hold.is_aside(piece) for piece in pieces] == [False, True, True, True]
    hold.end_read(pieces[0])
    owner.finish()  # the writer has not come to the others


def test_the_buffer_keeps_its_memory_types_and_shapes_from_save_to_save() -> None:
    buffer = AsideBuffer(1024)
    like = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    first = buffer.take(like)
    scalar = buffer.take(torch.tensor(3))
    assert first is not None and scalar is not None
    assert (first.dtype, first.shape, scalar.dtype, scalar.shape) == (
        torch.bfloat16,
        (2, 3),
        torch.int64,
        (),
    )
    assert scalar.data_ptr() - first.data_ptr() == 64
    assert buffer.take(torch.zeros(960, dtype=torch.uint8)) is None
    buffer.clear()
    again = buffer.take(torch.zeros(1024, dtype=torch.uint8))
    assert again is not None and again.data_ptr() == first.data_ptr()


def test_the_end_of_the_write_lets_everything_go() -> None:
    first, second = torch.zeros(4), torch.zeros(4)
    hold = hold_of(first, second)
    owner = Owner(hold, [first, second])
    assert owner.is_waiting() and not hold.is_over
    hold.finish()
    owner.finish()
    assert hold.is_over and not hold.was_given_up
    assert hold.statistics.wait_seconds > 0.0
    hold.give_up()
    assert not hold.was_given_up  # a write that had ended was not disturbed


def test_an_owner_that_waits_too_long_raises_and_spoils_the_write() -> None:
    piece = torch.zeros(4)
    hold = hold_of(piece, timeout_seconds=0.05)
    with pytest.raises(CheckpointError, match=r"within 0\.05 s: the storage hangs .*ckpt\.write_timeout"):
        hold.wait([piece])
    assert hold.was_given_up and hold.is_over


def test_an_owner_may_go_on_without_a_writer_that_hangs_which_spoils_the_write() -> None:
    piece = torch.zeros(4)
    hold = Hold([piece], buffer=None, timeout_seconds=0.05, on_timeout="give_up")
    hold.wait([piece])
    assert hold.was_given_up
    hold.wait([piece])
    assert torch.equal(read(hold, piece), piece)  # the writer finds its way out


def test_pieces_that_overlap_in_part_are_a_defect() -> None:
    slab = torch.zeros(10)
    with pytest.raises(AssertionError, match="overlap"):
        hold_of(slab[:6], slab[5:])


def test_the_limit_is_that_of_all_waits_together() -> None:
    piece = torch.zeros(4)
    hold = hold_of(piece)
    hold.statistics.wait_seconds = SECONDS  # waited before, for other pieces
    writer = threading.Timer(1.0, read, (hold, piece))
    writer.start()
    with pytest.raises(CheckpointError, match="did not let the optimizer's state go within 30 s"):
        hold.wait([piece])
    writer.join()
