"""Updates of host state while a write reads it, with a thread in the writer's place."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from contract.errors import CheckpointError
from tests.unit.trainer.optimizer.cases import (
    build,
    copy_of,
    copy_pieces,
    local_weights,
    parameters,
    update,
)
from trainer.config.optimizer import AdamWConfig, OptimizerConfig, SGDConfig
from trainer.hold import AsideBuffer, Hold
from trainer.optimizer.base import Optimizer

CONFIGS: list[OptimizerConfig] = [AdamWConfig(lr=0.1), SGDConfig(lr=0.1, momentum=0.9)]


def pieces_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """What a write reads by reference, in its order."""
    return [
        piece.tensor
        for item in optimizer.tensors().values()
        if item.residence == "host"
        for piece in item.pieces
    ]


def hold_over(optimizer: Optimizer, buffer: AsideBuffer | None = None, seconds: float = 30.0) -> Hold:
    hold = Hold(pieces_of(optimizer), buffer=buffer, timeout_seconds=seconds)
    optimizer.hold_state_updates(hold)
    return hold


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_each_chunk_waits_until_it_was_read_and_the_write_sees_the_state_of_the_save(
    config: OptimizerConfig,
) -> None:
    named, reference = parameters(), parameters()
    optimizer, undisturbed = build(config, named, "optimizer"), build(config, reference, "optimizer")
    for pair in ((named, optimizer), (reference, undisturbed)):
        update(*pair, range(2))
    pieces = pieces_of(optimizer)
    saved = [copy_of(piece) for piece in pieces]
    hold = hold_over(optimizer)
    read: list[torch.Tensor] = []
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(update, named, optimizer, range(2, 3))
        try:
            for index, piece in enumerate(pieces):
                # Nothing that was not read has changed, however far the step has come meanwhile.
                assert all(torch.equal(*pair) for pair in zip(pieces[index:], saved[index:], strict=True))
                assert not step.done()
                read.append(copy_of(hold.begin_read(piece)))
                hold.end_read(piece)
        finally:
            hold.finish()
        step.result(30)
    assert all(torch.equal(left, right) for left, right in zip(read, saved, strict=True))
    update(reference, undisturbed, range(2, 3))
    assert all(torch.equal(item, reference[name]) for name, item in named.items())
    for name, blocks in copy_pieces(undisturbed.tensors()).items():
        own = copy_pieces(optimizer.tensors())[name]
        assert all(torch.equal(own[offsets], block) for offsets, block in blocks.items())


def test_a_chunk_that_was_read_is_updated_while_the_write_goes_on() -> None:
    named = parameters()
    optimizer = build(AdamWConfig(lr=0.1), named, "optimizer")
    update(named, optimizer, range(1))
    *others, first_of_norm, second_of_norm = pieces_of(optimizer)
    saved, saved_norm = copy_of(others[0]), copy_of(first_of_norm)
    hold = hold_over(optimizer)
    for piece in others:
        hold.end_read(piece)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(update, named, optimizer, range(1, 2))
        try:
            deadline = time.monotonic() + 30
            while torch.equal(others[0], saved) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert not torch.equal(others[0], saved)
            assert not step.done() and torch.equal(first_of_norm, saved_norm)
        finally:
            hold.end_read(first_of_norm)
            hold.end_read(second_of_norm)
        step.result(30)
    assert not torch.equal(first_of_norm, saved_norm)


def test_with_room_for_copies_the_step_ends_before_anything_was_read() -> None:
    named = parameters()
    optimizer = build(AdamWConfig(lr=0.1), named, "optimizer")
    update(named, optimizer, range(2))
    pieces = pieces_of(optimizer)
    saved = [copy_of(piece) for piece in pieces]
    hold = hold_over(optimizer, AsideBuffer(1 << 16))
    update(named, optimizer, range(2, 3))
    assert not any(torch.equal(*pair) for pair in zip(pieces, saved, strict=True))
    assert all(torch.equal(hold.begin_read(p), s) for p, s in zip(pieces, saved, strict=True))


def test_weights_are_updated_before_the_wait_and_a_write_that_hangs_is_an_error() -> None:
    named = parameters()
    optimizer = build(AdamWConfig(lr=0.1), named, "optimizer")
    update(named, optimizer, range(1))
    weights, state = local_weights(named), copy_pieces(optimizer.tensors())
    hold_over(optimizer, seconds=0.05)
    with pytest.raises(CheckpointError, match=r"raise ckpt.write_timeout_seconds"):
        update(named, optimizer, range(1, 2))
    first_row = named["embed.weight"][0]
    assert not torch.equal(first_row, weights["embed.weight"][0])
    for name, blocks in copy_pieces(optimizer.tensors()).items():
        assert all(torch.equal(state[name][offsets], block) for offsets, block in blocks.items())
