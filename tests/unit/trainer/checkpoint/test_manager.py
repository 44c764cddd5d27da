"""Saving and loading in one process."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from contract.commit import inspect_step, scan, verify
from contract.errors import CheckpointError
from contract.layout import RunFolder
from tests.support.resume import planned
from tests.unit.trainer.checkpoint.fakes import FakePart
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import plan_resume
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.parallel.process import Process

CONFIG = {"model": {"name": "tiny"}, "optimizer": {"lr": 1e-5}, "resume": None, "clean": False}


def make_parts(fill: float = 1.0, **values: Any) -> dict[str, FakePart]:
    model = {"layers.0.w": torch.full((3, 5), fill), "norm": torch.full((4,), fill, dtype=torch.bfloat16)}
    moments = {"m.layers.0.w": torch.full((3, 5), 2 * fill), "step": torch.tensor(fill)}
    return {
        "model": FakePart(model),
        "optimizer": FakePart(moments, {"groups": [{"lr": 0.1 * fill}]}),
        "schedule": FakePart({}, {"updates": int(fill)}),
        "progress": FakePart({}, {"step": int(fill), **values}),
        "data": FakePart({}, {"cursor": int(10 * fill)}),
    }


def make_manager(
    folder: RunFolder, process: Process, parts: dict[str, FakePart] | None = None, **settings: Any
) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(**settings), folder, process, parts or make_parts(), CONFIG)


def committed(folder: RunFolder) -> list[int]:
    return [entry.step for entry in scan(folder.checkpoints) if entry.state == "committed"]


def save_now(manager: CheckpointManager, step: int) -> None:
    """Save `step` and learn how it went."""
    manager.save(step)
    manager.wait()


def load(folder: RunFolder, process: Process, parts: dict[str, FakePart], **resume: Any) -> CheckpointManager:
    manager = make_manager(folder, process, parts)
    manager.load(planned(ResumeConfig(**resume), folder, process, CONFIG))
    return manager


def test_saves_happen_at_the_interval_and_at_the_last_step_exactly_once(
    folder: RunFolder, process: Process
) -> None:
    manager = make_manager(folder, process, interval=2)
    blocked = {step: manager.save_if_due(step, last=step == 6) for step in range(1, 7)}
    assert [step for step, seconds in blocked.items() if seconds is not None] == [2, 4, 6]
    assert manager.save_if_due(6, last=True) is None
    assert committed(folder) == [2, 4, 6]
    assert [verify(entry.path) for entry in scan(folder.checkpoints)] == [[], [], []]


def test_without_an_interval_only_the_last_step_is_saved(folder: RunFolder, process: Process) -> None:
    manager = make_manager(folder, process)
    assert [manager.save_if_due(step, last=step == 3) is None for step in (1, 2, 3)] == [True, True, False]
    assert committed(folder) == [3]


def test_a_run_without_checkpoints_touches_nothing(folder: RunFolder, process: Process) -> None:
    manager = CheckpointManager(None, folder, process, make_parts(), CONFIG)
    assert manager.save_if_due(1, last=True) is None
    assert manager.poll() == {}
    manager.close()
    assert not folder.root.exists()


def test_everything_loads_as_it_was_saved(folder: RunFolder, process: Process) -> None:
    saved = make_parts(3.0)
    torch.manual_seed(5)
    make_manager(folder, process, saved).save(7)
    expected = random.random(), float(torch.rand(()))
    fresh = make_parts(0.0)
    load(folder, process, fresh)
    for name, part in saved.items():
        assert fresh[name].held_values == part.held_values
        for key, tensor in part.held.items():
            assert torch.equal(fresh[name].held[key], tensor), (name, key)
    assert (random.random(), float(torch.rand(()))) == expected


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("skip_optimizer", "optimizer"),
        ("skip_scheduler", "schedule"),
        ("skip_progress", "progress"),
        ("skip_data", "data"),
    ],
)
def test_a_skip_flag_leaves_out_its_part_and_no_other(
    folder: RunFolder, process: Process, flag: str, part: str
) -> None:
    make_manager(folder, process, make_parts(3.0)).save(7)
    fresh = make_parts(0.0)
    load(folder, process, fresh, **{flag: True})
    before, after = make_parts(0.0), make_parts(3.0)
    for name in fresh:
        expected = before if name == part else after
        assert fresh[name].held_values == expected[name].held_values, name
        assert all(
            torch.equal(fresh[name].held[key], tensor) for key, tensor in expected[name].held.items()
        ), name


def test_the_plan_says_what_is_loaded_what_is_skipped_and_what_changed(
    folder: RunFolder, process: Process
) -> None:
    make_manager(folder, process).save(7)
    now = {**CONFIG, "optimizer": {"lr": 2e-5}, "resume": {"step": 7}}
    plan = planned(ResumeConfig(step=7, skip_data=True), folder, process, now)
    assert plan.lines() == [
        f"resumes step 7 of {folder.checkpoints / 'step_7'} (written by 1 process)",
        "loads model, optimizer, schedule, progress",
        "starts afresh: data",
        "settings changed since: optimizer.lr: 1e-05 -> 2e-05",
    ]


def test_addresses_and_keys_of_policy_servers_are_in_no_checkpoint(
    folder: RunFolder, process: Process
) -> None:
    served = {
        **CONFIG,
        "servers": ["http://127.0.0.1:4001"],
        "server_key": "secret",
        "channel": {"type": "zmq", "port": 4001},
    }
    CheckpointManager(CheckpointConfig(), folder, process, make_parts(), served).save(7)
    step = folder.checkpoints / "step_7"
    files = [path for path in step.rglob("*") if path.is_file()]
    assert files and not any(word in path.read_bytes() for path in files for word in (b"secret", b"4001"))
    # A resumed run has other ports, which is no change of the run.
    now = {**served, "servers": ["http://127.0.0.1:4002"], "channel": {"type": "zmq", "port": 4002}}
    assert planned(ResumeConfig(), folder, process, now).changes == ()


def test_resume_without_any_checkpoint_is_an_error(folder: RunFolder, process: Process) -> None:
    with pytest.raises(CheckpointError, match=r"holds no checkpoint; remove `--resume`"):
        planned(ResumeConfig(), folder, process, CONFIG)


def test_a_run_that_died_before_its_first_checkpoint_is_resumed_from_the_beginning(
    folder: RunFolder, process: Process
) -> None:
    folder.root.mkdir(parents=True, exist_ok=True)
    folder.metrics.write_text('{"step": 1}\n')
    assert plan_resume(ResumeConfig(), folder, process, CONFIG) is None
    with pytest.raises(CheckpointError, match="no step 3"):
        plan_resume(ResumeConfig(step=3), folder, process, CONFIG)


def test_resume_dir_takes_a_step_of_any_run_and_no_ambiguous_folder(
    folder: RunFolder, process: Process
) -> None:
    manager = make_manager(folder, process)
    manager.save(7)
    elsewhere = RunFolder(folder.root.parent / "other")
    for path in (folder.checkpoints / "step_7", folder.checkpoints, folder.root):
        assert planned(ResumeConfig(dir=str(path)), elsewhere, process, CONFIG).step == 7
    manager.save(8)
    renamed = (folder.checkpoints / "step_7").rename(folder.root.parent / "best")
    assert planned(ResumeConfig(dir=str(renamed)), elsewhere, process, CONFIG).step == 7
    manager.save(9)
    with pytest.raises(CheckpointError, match=r"several checkpoints \(steps 8, 9\); name one of them"):
        planned(ResumeConfig(dir=str(folder.root)), elsewhere, process, CONFIG)
    (folder.checkpoints / "step_9" / "complete.json").unlink()
    with pytest.raises(CheckpointError, match=r"complete.json is missing"):
        planned(ResumeConfig(dir=str(folder.checkpoints / "step_9")), elsewhere, process, CONFIG)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        planned(ResumeConfig(dir=str(folder.root / "nowhere")), elsewhere, process, CONFIG)


def test_retention_deletes_only_after_the_newer_commit_and_knows_earlier_attempts(
    folder: RunFolder, process: Process
) -> None:
    manager = make_manager(folder, process, interval=1, keep_last=2, keep_interval=4)
    for step in range(1, 7):
        manager.save_if_due(step, last=False)
    assert committed(folder) == [4, 5, 6]
    (folder.checkpoints / "notes").mkdir()
    (folder.checkpoints / "step_2_copy").mkdir()
    again = CheckpointManager(CheckpointConfig(keep_last=1), folder, process, make_parts(), CONFIG)
    again.load(planned(ResumeConfig(), folder, process, CONFIG))
    assert committed(folder) == [4, 5, 6]
    again.save(7)
    assert committed(folder) == [7]
    assert (folder.checkpoints / "notes").is_dir() and (folder.checkpoints / "step_2_copy").is_dir()


def test_a_failed_save_deletes_nothing(folder: RunFolder, process: Process) -> None:
    parts = make_parts()
    manager = make_manager(folder, process, parts, keep_last=1)
    manager.save(1)
    parts["progress"].held_values["loss"] = float("nan")  # cannot be written as JSON
    with pytest.raises(CheckpointError, match="step 2 was not saved, earlier ones are unchanged"):
        save_now(manager, 2)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_1"]
    del parts["progress"].held_values["loss"]
    manager.save(3)
    assert committed(folder) == [3]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_committed(
    folder: RunFolder, process: Process, value: float
) -> None:
    parts = make_parts()
    parts["model"].held["norm"][2] = value
    with pytest.raises(CheckpointError, match="the weight norm holds NaN or infinity"):
        save_now(make_manager(folder, process, parts), 1)
    assert scan(folder.checkpoints) == []


def test_a_step_that_a_dead_attempt_left_half_written_is_cleared_at_the_start(
    folder: RunFolder, process: Process
) -> None:
    make_manager(folder, process).save(1)
    leftover = folder.checkpoints / "step_2.partial" / "trainer"
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half")
    manager = make_manager(folder, process)
    assert not leftover.exists()
    leftover.mkdir(parents=True)  # and one that appears later does not end up in the commit
    (leftover / "__7_0.distcp").write_bytes(b"of another attempt")
    manager.save(2)
    assert verify(folder.checkpoints / "step_2") == []
    assert not (folder.checkpoints / "step_2" / "trainer" / "__7_0.distcp").exists()


def test_a_broken_folder_of_the_same_step_is_replaced(folder: RunFolder, process: Process) -> None:
    make_manager(folder, process).save(1)
    (folder.checkpoints / "step_1" / "complete.json").unlink()
    make_manager(folder, process).save(1)
    assert verify(folder.checkpoints / "step_1") == []


def test_steps_of_the_history_that_a_resume_left_are_never_the_latest_again(
    folder: RunFolder, process: Process
) -> None:
    first = make_manager(folder, process, make_parts(1.0), interval=10)
    for step in (10, 20, 30):
        first.save(step)
    second_parts = make_parts(0.0)
    second = load(folder, process, second_parts, step=10)
    assert committed(folder) == [
        10,
        20,
        30,
    ]  # until the new history has a step of its own, nothing is given up
    second_parts["progress"].held_values["history"] = "second"
    second.save(20)
    assert committed(folder) == [10, 20]
    assert [inspect_step(folder.checkpoints / "superseded" / f"step_{step}").state for step in (20, 30)] == [
        "committed"
    ] * 2
    second.save(30)
    assert committed(folder) == [10, 20, 30]  # its own steps stay
    third_parts = make_parts(0.0)
    load(folder, process, third_parts)
    assert third_parts["progress"].held_values["history"] == "second"


def test_a_run_that_counts_from_0_again_does_not_take_old_steps_for_its_own(
    folder: RunFolder, process: Process
) -> None:
    make_manager(folder, process, make_parts(1.0)).save(10)
    parts = make_parts(5.0)
    manager = load(folder, process, parts, skip_progress=True)
    assert parts["model"].held["layers.0.w"][0, 0] == 1.0
    manager.save(3)
    assert committed(folder) == [3]
    assert inspect_step(folder.checkpoints / "superseded" / "step_10").state == "committed"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(5, 3), r"model.layers.0.w has shape \(3, 5\) in it, \(5, 3\) in this run"),
        (
            torch.zeros(3, 5, dtype=torch.bfloat16),
            r"has type torch.float32 in it, torch.bfloat16 in this run",
        ),
    ],
)
def test_a_tensor_of_another_shape_or_type_is_refused_before_anything_is_changed(
    folder: RunFolder, process: Process, tensor: torch.Tensor, message: str
) -> None:
    make_manager(folder, process, make_parts(3.0)).save(1)
    parts = make_parts(0.0)
    parts["model"].held["layers.0.w"] = tensor
    with pytest.raises(CheckpointError, match=message):
        load(folder, process, parts)
    assert not parts["model"].held["norm"].any() and not parts["optimizer"].held["m.layers.0.w"].any()


def test_a_tensor_or_part_that_the_checkpoint_lacks_is_an_error_that_names_the_flag(
    folder: RunFolder, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    saved = make_parts(3.0)
    del saved["optimizer"]
    make_manager(folder, process, saved).save(1)
    with pytest.raises(CheckpointError, match=r"holds no state of the optimizer; set resume.skip_optimizer"):
        load(folder, process, make_parts(0.0))
    wider = make_parts(0.0)
    wider["model"].held["layers.1.w"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"tensor layers.1.w is missing"):
        load(folder, process, wider, skip_optimizer=True)
    tracked = {**make_parts(0.0), "tracker": FakePart({}, {"run_id": "new"})}
    with caplog.at_level(logging.WARNING):
        load(folder, process, tracked, skip_optimizer=True)
    assert "holds no state of the tracker, which starts afresh" in caplog.text
    assert tracked["tracker"].held_values == {"run_id": "new"}


def test_silent_damage_is_found_before_it_is_loaded(folder: RunFolder, process: Process) -> None:
    make_manager(folder, process, make_parts(3.0)).save(1)
    largest = max(
        (folder.checkpoints / "step_1" / "trainer").glob("*.distcp"), key=lambda path: path.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{largest.name} is damaged"):
        load(folder, process, make_parts(0.0))


def test_without_checksums_only_sizes_are_recorded_and_the_step_loads(
    folder: RunFolder, process: Process
) -> None:
    make_manager(folder, process, make_parts(3.0), checksums=False).save(1)
    record = inspect_step(folder.checkpoints / "step_1").record
    assert record is not None
    assert {file.checksum is None for name, file in record.files.items() if name.endswith(".distcp")} == {
        True
    }
    parts = make_parts(0.0)
    load(folder, process, parts)
    assert parts["model"].held["norm"][0] == 3.0


def test_a_folder_that_cannot_be_written_is_refused_before_training(
    folder: RunFolder, process: Process
) -> None:
    folder.root.mkdir()
    folder.checkpoints.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be saved in .*checkpoints"):
        make_manager(folder, process)


def test_a_checkpoint_that_cannot_fit_is_refused_before_training(folder: RunFolder, process: Process) -> None:
    # A view of one number: a tensor of an exabyte that holds no memory.
    huge = {"model": FakePart({"w": torch.zeros(1).expand(1 << 58)})}
    with pytest.raises(CheckpointError, match=r"free and one checkpoint needs [\d.]+ GB; free some space"):
        make_manager(folder, process, huge)
    assert list(folder.checkpoints.iterdir()) == []


def test_group_options_of_several_parameter_groups_survive(folder: RunFolder, process: Process) -> None:
    groups = [
        {"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.01, "params": ["w"]},
        {"lr": 0.30000000000000004, "betas": [0.8, 0.99], "weight_decay": 0.0, "params": []},
    ]
    parts = {"model": FakePart({"w": torch.ones(2)}), "optimizer": FakePart({}, {"groups": groups})}
    make_manager(folder, process, parts).save(1)
    fresh = {"model": FakePart({"w": torch.zeros(2)}), "optimizer": FakePart({}, {"groups": []})}
    load(folder, process, fresh)
    assert fresh["optimizer"].held_values == {"groups": groups}


def test_the_commit_is_logged_with_bytes_and_rate(
    folder: RunFolder, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="trainer.checkpoint"):
        save_now(make_manager(folder, process), 4)
    assert any(
        record.getMessage().startswith("saved step 4: ") and "MB/s" in record.getMessage()
        for record in caplog.records
    )
