"""The state of another process in the commits of the trainer."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from contract.commit import inspect_step, scan, verify
from contract.errors import CheckpointError
from contract.layout import RunFolder
from contract.store import StoreFolder, read_bytes
from tests.unit.trainer.checkpoint.fakes import FakeOwner, FakePart, Gate, GatedStorage, simple_parts
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import plan_resume
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.parallel.process import Process


class Other:
    """A process whose state is a number."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number

    def content(self) -> bytes:
        return json.dumps(self.number).encode()

    def loaded(self, content: bytes) -> None:
        self.number = json.loads(content)


def open_manager(folder: RunFolder, process: Process, other: Other, **options: Any) -> CheckpointManager:
    config = CheckpointConfig(**options.pop("settings", {}))
    parts = {**simple_parts(), "data": FakePart({}, {"position": 0})}
    return CheckpointManager(
        config, folder, process, parts, {}, companions={"orchestrator": other}, **options
    )


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    """Of a run whose steps lie in its folder, or in a store."""
    store = StoreFolder(f"memory://{uuid.uuid4().hex}/rl/checkpoints")
    return RunFolder(tmp_path / "run", store if request.param == "store" else None)


def test_the_state_of_another_process_is_a_component_of_the_commit(
    place: RunFolder, process: Process
) -> None:
    other = Other()
    manager = open_manager(place, process, other)
    manager.save_if_due(0, now=True)
    other.number = 7
    manager.save_if_due(3, now=True)
    entries = scan(place.steps)
    assert [entry.step for entry in entries] == [0, 3]
    for entry, number in zip(entries, (None, 7), strict=True):
        assert entry.record is not None and entry.record.components == ["trainer", "orchestrator"]
        content = read_bytes(entry.path, "orchestrator/state.json")
        assert json.loads(content) == number
        file = entry.record.files["orchestrator/state.json"]
        assert file.size == len(content) and file.checksum is not None
        assert verify(entry.path) == []


def test_damage_in_it_is_found(folder: RunFolder, process: Process) -> None:
    open_manager(folder, process, Other(12)).save_if_due(1, now=True)
    (folder.checkpoints / "step_1" / "orchestrator" / "state.json").write_text("21")
    (problem,) = verify(folder.checkpoints / "step_1")
    assert "orchestrator/state.json is damaged" in problem
    (folder.checkpoints / "step_1" / "orchestrator" / "state.json").unlink()
    assert inspect_step(folder.checkpoints / "step_1").problem == "orchestrator/state.json is missing"


def test_a_save_behind_the_step_holds_the_state_of_its_own_step(folder: RunFolder, process: Process) -> None:
    gate, other = Gate(), Other(1)
    parts = simple_parts()
    manager = CheckpointManager(
        CheckpointConfig(async_save=True),
        folder,
        process,
        parts,
        {},
        state_owners=[FakeOwner([parts["optimizer"].held["m"]])],
        is_state_on_host=True,
        companions={"orchestrator": other},
        storage=GatedStorage(folder.checkpoints, gate),
    )
    gate.close()
    manager.save_if_due(1, now=True)
    other.number = 2
    gate.open.set()
    manager.wait()
    assert (folder.checkpoints / "step_1" / "orchestrator" / "state.json").read_text() == "1"
    manager.save_if_due(2, last=True)
    assert (folder.checkpoints / "step_2" / "orchestrator" / "state.json").read_text() == "2"
    manager.close()


def test_a_run_goes_on_with_the_state_of_the_step_that_it_resumes(place: RunFolder, process: Process) -> None:
    other = Other()
    manager = open_manager(place, process, other)
    for step in (1, 2):
        other.number = 10 * step
        manager.save_if_due(step, now=True)
    resumed = Other()
    manager = open_manager(place, process, resumed)
    plan = plan_resume(ResumeConfig(step=1), place, process, {}, companions=("orchestrator",))
    assert plan is not None
    manager.load(plan)
    assert resumed.number == 10
    # Before the first batch there is no newer state: a save elsewhere must not lose it.
    assert resumed.content() == b"10"


def test_a_step_without_it_is_resumed_only_if_the_data_starts_afresh(
    place: RunFolder, process: Process
) -> None:
    parts = {**simple_parts(), "data": FakePart({}, {"position": 0})}
    CheckpointManager(CheckpointConfig(), place, process, parts, {}).save_if_due(4, last=True)
    path = str(next(iter(scan(place.steps))).path)
    for resume in (ResumeConfig(), ResumeConfig(step=4), ResumeConfig(dir=path)):
        with pytest.raises(CheckpointError, match=r"holds no state of:? orchestrator"):
            plan_resume(resume, place, process, {}, companions=("orchestrator",))
    other = Other(5)
    plan = plan_resume(ResumeConfig(skip_data=True), place, process, {}, companions=("orchestrator",))
    assert plan is not None
    open_manager(place, process, other).load(plan)
    assert other.number == 5
