"""What a snapshot copies, what it refers to, and which memory it keeps."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tests.unit.trainer.checkpoint.fakes import FakePart
from trainer.checkpoint.base import Snapshot
from trainer.checkpoint.snapshot import SnapshotBuffers, refer
from trainer.parallel.device import Device


def take(buffers: SnapshotBuffers, **parts: FakePart) -> Snapshot:
    return buffers.take(1, parts, {}, {}, timeout_seconds=1.0, on_timeout="raise")


def new_buffers() -> SnapshotBuffers:
    return SnapshotBuffers(Device(torch.device("cpu")), 0)


def address(snapshot: Snapshot, name: str) -> int:
    return snapshot.tensors[name].pieces[0].tensor.data_ptr()


def test_device_tensors_are_copied_and_host_tensors_are_referred_to() -> None:
    weight, moment = torch.ones(8), torch.ones(8)
    snapshot = take(
        new_buffers(), model=FakePart({"w": weight}), optimizer=FakePart({"m": moment}, residence="host")
    )
    assert address(snapshot, "optimizer.m") == moment.data_ptr()
    assert address(snapshot, "model.w") != weight.data_ptr()
    weight.zero_()
    assert torch.equal(snapshot.tensors["model.w"].pieces[0].tensor, torch.ones(8))
    assert snapshot.hold is not None and snapshot.hold.covers(moment)
    assert not snapshot.hold.covers(snapshot.tensors["model.w"].pieces[0].tensor)


def test_buffers_are_used_again_and_freed_with_their_tensor() -> None:
    part = FakePart({"a": torch.ones(1000), "b": torch.ones(1000)})
    buffers = new_buffers()
    first = take(buffers, model=part)
    addresses = {name: address(first, name) for name in first.tensors}
    part.held["a"] = torch.full((1000,), 2.0)  # other memory, the same tensor
    second = take(buffers, model=part)
    assert {name: address(second, name) for name in second.tensors} == addresses
    assert float(second.tensors["model.a"].pieces[0].tensor[0]) == 2.0
    buffer = weakref.ref(second.tensors["model.b"].pieces[0].tensor)
    del part.held["b"], first, second
    assert buffer() is not None  # kept between saves
    take(buffers, model=part)
    assert buffer() is None
    part.held["a"] = torch.ones(10)
    assert take(buffers, model=part).tensors["model.a"].pieces[0].tensor.shape == (10,)


def test_values_that_a_part_goes_on_to_change_are_fixed_in_the_snapshot() -> None:
    live: dict[str, Any] = {"cursor": {"rows": [1, 2]}}
    part = FakePart({}, live)
    snapshots = [take(new_buffers(), data=part), refer(1, {"data": part}, {}, {})]
    part.held_values["cursor"]["rows"].append(3)
    assert [snapshot.values["data"] for snapshot in snapshots] == [{"cursor": {"rows": [1, 2]}}] * 2


def test_a_snapshot_by_reference_copies_and_holds_nothing() -> None:
    weight = torch.ones(4)
    snapshot = refer(1, {"model": FakePart({"w": weight})}, {}, {})
    assert address(snapshot, "model.w") == weight.data_ptr() and snapshot.hold is None
