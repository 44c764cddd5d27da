"""What counts as a checkpoint and which one is chosen: the same in a local folder and in a store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from contract.commit import inspect_step, remove_step, resolve_step, scan, verify
from contract.errors import CheckpointError
from tests.unit.contract.places import FILES, LocalPlace, MemoryPlace, Place, record_of


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return LocalPlace(tmp_path) if request.param == "local" else MemoryPlace()


def test_the_latest_step_is_the_greatest_number_and_not_the_last_name(place: Place) -> None:
    for step in (9, 10, 100, 20):
        place.write_step(step)
    resolved = resolve_step(place.checkpoints)
    assert resolved is not None
    assert (resolved.entry.step, resolved.warnings) == (100, ())
    assert [entry.step for entry in scan(place.checkpoints)] == [9, 10, 20, 100]


def test_names_that_are_not_ours_are_neither_listed_nor_chosen(place: Place) -> None:
    place.write_step(3)
    for name in ("step_007", "step_99_backup", "best", "step_12.old", "step_-1", "step_9.1", "step_9 (copy)"):
        place.put(f"{name}/complete.json", place.get("step_3/complete.json"))
    place.put("step_50", b"a file, not a folder")
    assert [entry.path.name for entry in scan(place.checkpoints)] == ["step_3"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda place: place.drop("step_20/complete.json"), "complete.json is missing"),
        (lambda place: place.drop("step_20/trainer/.metadata"), "trainer/.metadata is missing"),
        (lambda place: place.drop("step_20/trainer/__0_0.distcp"), "trainer/__0_0.distcp is missing"),
        (
            lambda place: place.put("step_20/trainer/state.json", b"{"),
            "trainer/state.json has 1 bytes, 2 were recorded",
        ),
        (
            lambda place: place.put("step_20/complete.json", b'{"format_version": 1, "st'),
            "not a commit record",
        ),
    ],
    ids=["marker", "metadata", "shard", "truncated", "torn marker"],
)
def test_a_broken_newest_step_gives_way_to_the_one_before_with_a_warning(
    place: Place, damage: Callable[[Place], None], reason: str
) -> None:
    place.write_step(10)
    place.write_step(20)
    damage(place)
    resolved = resolve_step(place.checkpoints)
    assert resolved is not None
    assert resolved.entry.step == 10
    assert len(resolved.warnings) == 1
    assert "step_20" in resolved.warnings[0] and reason in resolved.warnings[0]
    with pytest.raises(CheckpointError, match=r"step 20 cannot be loaded.*available: 10") as error:
        resolve_step(place.checkpoints, 20)
    assert reason in str(error.value)


def test_a_missing_step_names_the_steps_that_there_are(place: Place) -> None:
    for step in (10, 20):
        place.write_step(step)
    with pytest.raises(CheckpointError, match=r"no step 30 in .*available: 10, 20"):
        resolve_step(place.checkpoints, 30)


def test_only_a_first_save_that_was_cut_short_is_no_checkpoint_that_was_lost(place: Place) -> None:
    assert resolve_step(place.checkpoints) is None
    place.begin(5)
    assert resolve_step(place.checkpoints) is None
    place.write_step(3)
    place.drop("step_3/trainer/.metadata")
    with pytest.raises(CheckpointError, match=r"none that can be loaded \(step_3: .*step_5.*: .*never"):
        resolve_step(place.checkpoints)


def test_an_unknown_format_version_is_named_and_never_replaced(place: Place) -> None:
    newer = place.write_step(20)
    content = json.dumps({"format_version": 7, "shape": "unknown", "step": 20}).encode()
    place.put("step_20/complete.json", content)
    with pytest.raises(CheckpointError, match="its format version is 7, this Tailrace reads version 1"):
        resolve_step(place.checkpoints, 20)
    with pytest.raises(CheckpointError, match="is not replaced"):
        place.write_step(20)
    assert inspect_step(newer).state == "unknown_format"
    assert place.get("step_20/complete.json") == content


def test_a_step_without_a_component_that_the_run_needs_is_neither_chosen_nor_committed(place: Place) -> None:
    place.write_step(10)
    with pytest.raises(CheckpointError, match="holds no state of orchestrator"):
        resolve_step(place.checkpoints, components=("trainer", "orchestrator"))
    record = msgspec.structs.replace(record_of(11, FILES), components=["trainer", "orchestrator"])
    with pytest.raises(CheckpointError, match="no file of component 'orchestrator' was recorded"):
        place.commit(place.begin(11), record)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({**FILES, "trainer/__0_0.distcp": b"short"}, r"__0_0\.distcp has 5 bytes, 17 were recorded"),
        (
            {name: FILES[name] for name in FILES if "__0_0" not in name},
            r"trainer/__0_0\.distcp is missing",
        ),
        ({**FILES, "trainer/__1_0.distcp": b"other"}, r"trainer/__1_0\.distcp is not of this attempt"),
    ],
    ids=["size", "missing", "too many"],
)
def test_a_commit_refuses_files_that_are_not_those_that_were_written(
    place: Place, files: dict[str, bytes], reason: str
) -> None:
    written = place.begin(5, files)
    with pytest.raises(CheckpointError, match=reason):
        place.commit(written, record_of(5, FILES))
    assert [entry.state for entry in scan(place.checkpoints)] == ["uncommitted"]


def test_removal_deletes_the_whole_step_and_nothing_else(place: Place) -> None:
    place.write_step(1)
    place.write_step(11)
    remove_step(place.checkpoints / "step_1")
    remove_step(place.begin(3))
    assert [entry.path.name for entry in scan(place.checkpoints)] == ["step_11"]
    assert verify(place.checkpoints / "step_11") == []


def test_verify_finds_damage_that_keeps_the_size(place: Place) -> None:
    step = place.write_step(5)
    assert verify(step) == []
    content = bytearray(place.get("step_5/trainer/__0_0.distcp"))
    content[3] ^= 1
    place.put("step_5/trainer/__0_0.distcp", bytes(content))
    (problem,) = verify(step)
    assert problem.startswith("trainer/__0_0.distcp is damaged")
    assert inspect_step(step).state == "committed"
    place.drop("step_5/trainer/__0_0.distcp")
    assert verify(step) == ["trainer/__0_0.distcp is missing"]


def test_a_renamed_step_is_not_taken_for_another_number_and_any_other_name_takes_its_own(
    place: Place,
) -> None:
    place.write_step(5)
    for name in ("complete.json", *FILES):
        for copy in ("step_6", "best"):
            place.put(f"{copy}/{name}", place.get(f"step_5/{name}"))
    assert inspect_step(place.checkpoints / "step_6").problem == "complete.json is that of step 5"
    entry = inspect_step(place.checkpoints / "best")
    assert (entry.step, entry.problem) == (5, None)
