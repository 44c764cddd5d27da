"""Saves behind the training step: what is written is the state at the moment of the save."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from contract.layout import RunFolder
from tests.support.ranks import run_ranks
from tests.support.resume import planned
from tests.unit.trainer.checkpoint.fakes import (
    FakeOwner,
    FakePart,
    Gate,
    committed,
    open_async,
    process_of_rank,
)
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.reader import read_tensors
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.parallel.process import Process


def sharded_state() -> tuple[dict[str, FakePart], dict[str, torch.Tensor], torch.Tensor]:
    """Parts, the host state among them, and the weight that lives on the device."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.randn(9, 40), mesh, [Shard(0)])
    slab = torch.randn(3, 200)
    state: dict[str, torch.Tensor] = {
        "m": distribute_tensor(torch.randn(9, 40), mesh, [Shard(0)]),
        "v": distribute_tensor(torch.randn(9, 40), mesh, [Shard(0)]),
        "s0": slab[0],
        "s2": slab[2],
        "step": torch.tensor(4.0),
    }
    parts = {
        "model": FakePart({"w": weight}),
        "optimizer": FakePart(state, {"lr": 0.1}, residence="host"),
    }
    return parts, state, weight


def compare_with_synchronous(root: str, obeys: bool, buffer_gib: float) -> tuple[int, float]:
    """Number of tensors that differ (on rank 0), and seconds that the owner waited.

    No byte is written before the owner has tried to change everything: without the hold it succeeds.
    """
    torch.manual_seed(0)
    process, gate = process_of_rank(), Gate()
    parts, state, weight = sharded_state()
    reference, folder = RunFolder(Path(root) / "reference"), RunFolder(Path(root) / "run")
    CheckpointManager(CheckpointConfig(), reference, process, parts, {}).save(2).result()
    owner = FakeOwner(state.values(), obeys=obeys)
    manager = open_async(process, folder, parts, gate, owner, async_buffer_gib=buffer_gib)
    gate.close()
    manager.save(2)
    weight.add_(1.0)
    update = threading.Thread(target=owner.update)
    update.start()
    update.join(0.5 if obeys and not buffer_gib else 30)
    assert update.is_alive() == (obeys and not buffer_gib)
    gate.open.set()
    values = manager.wait()
    update.join(30)
    found = {place: read_tensors_of(place) for place in (reference, folder)} if process.is_main else {}
    process.barrier()
    differing = [
        name
        for name, tensor in found.get(reference, {}).items()
        if not torch.equal(found[folder][name], tensor)
    ]
    return len(differing), values["checkpoint/hold_seconds"]


def read_tensors_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    step = folder.checkpoints / "step_2"
    return {
        f"{part}.{name}": tensor
        for part in ("model", "optimizer")
        for name, tensor in read_tensors(step, part).items()
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_differs_from_a_synchronous_save_while_the_owner_obeys_the_hold(
    tmp_path: Path, world_size: int
) -> None:
    ranks = run_ranks(compare_with_synchronous, world_size, str(tmp_path), True, 0.0)
    assert [differing for differing, _ in ranks] == [0] * world_size
    assert all(seconds > 0 for _, seconds in ranks)


def test_nothing_differs_where_state_is_copied_aside_and_nobody_waits(tmp_path: Path) -> None:
    ranks = run_ranks(compare_with_synchronous, 2, str(tmp_path), True, 0.001)
    assert [differing for differing, _ in ranks] == [0, 0]


def test_without_the_hold_what_is_written_is_not_what_was_saved(tmp_path: Path) -> None:
    (differing, _), _ = run_ranks(compare_with_synchronous, 2, str(tmp_path), False, 0.0)
    assert differing >= 1


def simple_parts(fill: float = 0.0) -> dict[str, FakePart]:
    return {
        "model": FakePart({"w": torch.full((40,), fill)}),
        "optimizer": FakePart({"m": torch.full((40,), fill)}, residence="host"),
        "progress": FakePart({}, {"step": 0}),
    }


def open_later(gate: Gate) -> None:
    threading.Timer(0.3, gate.open.set).start()


def test_the_step_is_not_blocked_and_the_outcome_is_told_later(folder: RunFolder, process: Process) -> None:
    gate = Gate()
    manager = open_async(process, folder, simple_parts(), gate, interval=2)
    gate.close()
    values = manager.save_if_due(2)
    assert values is not None and values.keys() == {"time/save_ckpt"}
    assert manager.poll() == {} and committed(folder) == []
    gate.open.set()
    told: dict[str, float] = {}
    while not told:
        told = manager.poll()
    assert told["checkpoint/step"] == 2 and told["checkpoint/bytes"] > 0
    assert {"checkpoint/write_seconds", "checkpoint/write_mb_per_s", "checkpoint/hold_seconds"} < told.keys()
    assert manager.poll() == {} and committed(folder) == [2]


def test_the_next_save_waits_for_the_one_in_flight(folder: RunFolder, process: Process) -> None:
    gate = Gate()
    manager = open_async(process, folder, simple_parts(), gate)
    gate.close()
    first = manager.save(1)
    open_later(gate)
    second = manager.save(2)
    assert first.done() and 1 in committed(folder)
    assert second.result(30).step == 2
    manager.close()


@pytest.mark.parametrize("step", [1, 2])
def test_the_last_save_waits_for_itself_and_for_the_one_in_flight(
    folder: RunFolder, process: Process, step: int
) -> None:
    gate = Gate()
    manager = open_async(process, folder, simple_parts(), gate)
    gate.close()
    manager.save_if_due(1, now=True)
    open_later(gate)
    manager.save_if_due(step, last=True)
    assert committed(folder) == list(range(1, step + 1))  # a step in flight is not saved again


def test_a_resident_state_is_saved_in_the_step_and_the_log_says_so(
    folder: RunFolder, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="trainer.checkpoint"):
        manager = CheckpointManager(CheckpointConfig(async_save=True), folder, process, simple_parts(), {})
    (message,) = [record.getMessage() for record in caplog.records]
    assert "ckpt.async_save has no effect with model.offload = 'none'" in message
    assert "set model.offload = 'optimizer' or 'full'" in message
    assert manager.save(1).done() and committed(folder) == [1]


class Watcher:
    """Looks at the committed steps all the time, on a thread of its own."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self.counts: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            # A folder that vanishes between the listing and the look inside counts as not committed; a
            # deletion comes after a commit, so the look is repeated.
            self.counts.append(max(len(committed(self._folder)) for _ in range(2)))
            time.sleep(0.0005)

    def finish(self) -> list[int]:
        self._is_over.set()
        self._thread.join(30)
        return self.counts


def test_exactly_two_steps_are_kept_after_each_commit_and_never_fewer_also_across_a_resume(
    folder: RunFolder, process: Process
) -> None:
    gate = Gate()
    step = 0
    watcher: Watcher | None = None
    for attempt in range(3):
        manager = open_async(process, folder, simple_parts(float(step)), gate, keep_last=2)
        if attempt:
            manager.load(planned(ResumeConfig(), folder, process, {}))
        for _ in range(4):
            step += 1
            before = committed(folder)
            gate.close()
            manager.save(step)
            assert gate.reached.wait(30)
            assert committed(folder) == before  # the one in flight neither counts nor displaces
            gate.open.set()
            manager.wait()
            assert committed(folder) == list(range(max(1, step - 1), step + 1))
            if step == 2:
                watcher = Watcher(folder)
        manager.close()
    assert watcher is not None
    counts = watcher.finish()
    assert min(counts) == 2 and max(counts) <= 3
