"""Saving and loading through the manager in a store in this process's memory."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.commit import scan, scan_superseded, verify
from contract.errors import CheckpointError
from contract.layout import RunFolder
from contract.store import StoreFolder
from tests.support.resume import planned
from tests.unit.trainer.checkpoint.fakes import FakePart
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.reader import read_tensors
from trainer.checkpoint.storage import open_storage
from trainer.checkpoint.storage_store import StoreFiles, StoreStorage
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.parallel.process import Process

CONFIG: dict[str, Any] = {"seed": 1}


@pytest.fixture
def store() -> StoreFolder:
    return StoreFolder(f"memory://{uuid.uuid4().hex}/sft/checkpoints")


@pytest.fixture
def folder(tmp_path: Path, store: StoreFolder) -> RunFolder:
    return RunFolder(tmp_path / "run", store)


def make_parts(fill: float) -> dict[str, FakePart]:
    weights = {"w": torch.arange(30.0).reshape(6, 5) * fill, "half": torch.full((4,), fill).bfloat16()}
    moments = FakePart({"m.w": torch.full((6, 5), 2 * fill)}, {"lr": fill})
    return {"model": FakePart(weights), "optimizer": moments, "progress": FakePart({}, {"step": int(fill)})}


def make_manager(
    folder: RunFolder, process: Process, fill: float = 1.0, **settings: Any
) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(**settings), folder, process, make_parts(fill), CONFIG)


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save_if_due(step, last=True)


def committed(folder: RunFolder) -> list[int]:
    return [entry.step for entry in scan(folder.steps) if entry.state == "committed"]


def test_what_is_saved_in_a_store_loads_from_there_and_nothing_lies_in_the_run_folder(
    folder: RunFolder, process: Process
) -> None:
    save(make_manager(folder, process, 3.0), 7)
    assert [verify(entry.path) for entry in scan(folder.steps)] == [[]]
    parts = make_parts(0.0)
    manager = CheckpointManager(None, folder, process, parts, CONFIG)
    manager.load(planned(ResumeConfig(), folder, process, CONFIG))
    for name, part in make_parts(3.0).items():
        assert parts[name].held_values == part.held_values
        assert all(torch.equal(parts[name].held[key], tensor) for key, tensor in part.held.items()), name
    assert not folder.root.exists()


def test_old_steps_are_pruned_in_a_store_after_a_newer_one_is_committed(
    folder: RunFolder, process: Process, store: StoreFolder
) -> None:
    save(make_manager(folder, process, keep_last=2, keep_interval=10), 5, 10, 15, 20, 25)
    assert committed(folder) == [10, 20, 25]
    assert {name.split("/")[0] for name in store.sizes()} == {"step_10", "step_20", "step_25"}


def test_steps_after_the_one_resumed_are_superseded_and_their_numbers_saved_anew(
    folder: RunFolder, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_manager(folder, process, 1.0), 10, 20, 30)
    parts = make_parts(0.0)
    manager = CheckpointManager(CheckpointConfig(), folder, process, parts, CONFIG)
    manager.load(planned(ResumeConfig(step=10), folder, process, CONFIG))
    assert committed(folder) == [10, 20, 30]  # until the new history is saved
    parts["model"].held["w"] += 1
    with caplog.at_level(logging.WARNING):
        save(manager, 20)
    assert committed(folder) == [10, 20]
    assert "step 30 is of the history before this resume" in caplog.text
    left = scan_superseded(folder.steps)
    assert [(entry.step, entry.state) for entry in left] == [(20, "committed"), (30, "committed")]
    old = read_tensors(left[0].path, "model")["w"]
    new = read_tensors(scan(folder.steps)[1].path, "model")["w"]
    assert torch.equal(old, make_parts(1.0)["model"].held["w"])
    assert torch.equal(new, old + 1)
    plan = planned(ResumeConfig(dir=str(left[1].path)), folder, process, CONFIG)
    assert (plan.step, plan.path) == (30, left[1].path)


def test_what_a_dead_attempt_left_in_a_store_is_removed_at_the_next_start(
    folder: RunFolder, process: Process, store: StoreFolder
) -> None:
    save(make_manager(folder, process), 1)
    for name in ("step_2/trainer/__0_0.distcp", "step_1.2/trainer/state.json", "notes/mine.txt"):
        store.write_bytes(name, b"left")
    make_manager(folder, process)
    assert {name.split("/")[0] for name in store.sizes()} == {"step_1", "notes"}


def test_a_step_that_was_not_committed_is_written_anew_without_the_old_files(
    folder: RunFolder, process: Process, store: StoreFolder
) -> None:
    manager = make_manager(folder, process)
    store.write_bytes("step_2/trainer/__7_0.distcp", b"left by another attempt")
    save(manager, 2)
    assert verify(store / "step_2") == []
    assert "step_2/trainer/__7_0.distcp" not in store.sizes()


def test_a_failed_save_leaves_nothing_in_a_store_and_earlier_steps_alone(
    folder: RunFolder, process: Process, store: StoreFolder
) -> None:
    parts = make_parts(1.0)
    manager = CheckpointManager(CheckpointConfig(), folder, process, parts, CONFIG)
    save(manager, 1)
    parts["model"].held["w"][0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"step 2 was not saved.*memory://"):
        save(manager, 2)
    assert {name.split("/")[0] for name in store.sizes()} == {"step_1"}
    assert verify(store / "step_1") == []


def test_a_file_that_is_not_written_to_its_end_does_not_appear(store: StoreFolder) -> None:
    files = StoreFiles(store)
    path = files.concat_path(str(store), "a.distcp")
    with pytest.raises(KeyboardInterrupt), files.create(path) as file:
        file.write(memoryview(b"half"))
        raise KeyboardInterrupt
    assert store.sizes() == {}
    with files.create(path) as file:
        file.write(memoryview(b"whole"))
    assert store.read_bytes("a.distcp") == b"whole"


def test_a_commit_whose_answer_was_lost_is_taken_back(store: StoreFolder) -> None:
    """The marker was written and the writer did not learn of it: what it then discards is that step."""
    storage = StoreStorage(store)
    storage.begin(3)
    storage.write_file(3, "state.json", b"{}")
    (store / "step_3").write_bytes("complete.json", b"{}")
    storage.discard(3)
    assert store.sizes() == {}


def test_a_step_begins_empty(store: StoreFolder) -> None:
    store.write_bytes("step_3/trainer/__0_0.distcp", b"of another attempt")
    StoreStorage(store).begin(3)
    assert store.sizes() == {}


def test_memory_is_refused_to_several_processes_and_named_as_passing(
    store: StoreFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError, match="memory of one process, and this run has 2"):
        open_storage(store, 2)
    with caplog.at_level(logging.WARNING):
        open_storage(store, 1)
    assert "gone when this process ends" in caplog.text


def test_a_step_that_was_superseded_before_is_not_superseded_again(
    folder: RunFolder, process: Process, store: StoreFolder
) -> None:
    save(make_manager(folder, process), 5)
    storage = StoreStorage(store)
    assert [storage.set_aside(5), storage.set_aside(5)] == [f"{store}/step_5 with superseded.json", None]
    assert [entry.step for entry in scan_superseded(store)] == [5]
