"""The commit record and the choice of steps, on folders made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import xxhash

from contract.commit import (
    FORMAT_VERSION,
    CommitRecord,
    FileRecord,
    commit,
    digest_config,
    inspect_step,
    remove_step,
    resolve_step,
    scan,
    set_aside,
    verify,
)
from contract.errors import CheckpointError

FILES = {
    "trainer/.metadata": b"meta",
    "trainer/__0_0.distcp": b"tensors of rank 0",
    "trainer/state.json": b"{}",
}


def record_of(step: int, files: dict[str, bytes], *, checksums: bool = True) -> CommitRecord:
    records = {
        name: FileRecord(
            len(content), f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}" if checksums else None
        )
        for name, content in files.items()
    }
    return CommitRecord(
        FORMAT_VERSION, step, 2, ["trainer"], records, {"torch": "2"}, "abc", "2026-01-01T00:00:00+00:00"
    )


def write_partial(checkpoints: Path, step: int, files: dict[str, bytes] = FILES) -> Path:
    partial = checkpoints / f"step_{step}.partial"
    for name, content in files.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(content)
    return partial


def write_step(checkpoints: Path, step: int, *, checksums: bool = True) -> Path:
    final = checkpoints / f"step_{step}"
    commit(write_partial(checkpoints, step), final, record_of(step, FILES, checksums=checksums))
    return final


def test_the_latest_step_is_the_greatest_number_and_not_the_last_name(tmp_path: Path) -> None:
    for step in (9, 10, 100, 20):
        write_step(tmp_path, step)
    resolved = resolve_step(tmp_path)
    assert resolved is not None
    assert (resolved.entry.step, resolved.warnings) == (100, ())
    assert [entry.step for entry in scan(tmp_path)] == [9, 10, 20, 100]


def test_names_that_are_not_ours_are_neither_listed_nor_chosen(tmp_path: Path) -> None:
    write_step(tmp_path, 3)
    for name in ("step_007", "step_99_backup", "best", "step_12.old", "step_-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_50").write_text("a file, not a folder")
    assert [entry.path.name for entry in scan(tmp_path)] == ["step_3"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda step: (step / "complete.json").unlink(), "complete.json is missing"),
        (lambda step: (step / "trainer/.metadata").unlink(), "trainer/.metadata is missing"),
        (lambda step: (step / "trainer/__0_0.distcp").unlink(), "trainer/__0_0.distcp is missing"),
        (
            lambda step: (step / "trainer/state.json").write_bytes(b"{"),
            "trainer/state.json has 1 bytes, 2 were recorded",
        ),
        (
            lambda step: (step / "complete.json").write_text('{"format_version": 1, "st'),
            "not a commit record",
        ),
        (lambda step: step.rename(step.with_name("step_20.partial")), "never committed"),
    ],
    ids=["marker", "metadata", "shard", "truncated", "torn marker", "partial"],
)
def test_a_broken_newest_step_gives_way_to_the_one_before_with_a_warning(
    tmp_path: Path, damage, reason: str
) -> None:
    write_step(tmp_path, 10)
    damage(write_step(tmp_path, 20))
    resolved = resolve_step(tmp_path)
    assert resolved is not None
    assert resolved.entry.step == 10
    assert len(resolved.warnings) == 1
    assert "step_20" in resolved.warnings[0] and reason in resolved.warnings[0]
    with pytest.raises(CheckpointError, match=r"step 20 cannot be loaded.*available: 10") as error:
        resolve_step(tmp_path, 20)
    assert reason in str(error.value)


def test_a_missing_step_names_the_steps_that_there_are(tmp_path: Path) -> None:
    for step in (10, 20):
        write_step(tmp_path, step)
    with pytest.raises(CheckpointError, match=r"no step 30 in .*available: 10, 20"):
        resolve_step(tmp_path, 30)


def test_steps_of_which_none_is_complete_are_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    assert resolve_step(tmp_path) is None
    assert resolve_step(tmp_path / "missing") is None
    # A process that died over its very first save has lost no checkpoint.
    write_partial(tmp_path, 5)
    assert resolve_step(tmp_path) is None
    step = write_step(tmp_path, 3)
    (step / "complete.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"none that can be loaded \(step_3: .*step_5.partial: it was never"
    ):
        resolve_step(tmp_path)


def test_an_unknown_format_version_is_named_and_never_replaced(tmp_path: Path) -> None:
    newer = write_step(tmp_path, 20)
    content = json.loads((newer / "complete.json").read_text())
    (newer / "complete.json").write_text(
        json.dumps({"format_version": 7, "shape": "unknown", "step": content["step"]})
    )
    with pytest.raises(CheckpointError, match="its format version is 7, this Tailrace reads version 1"):
        resolve_step(tmp_path, 20)
    with pytest.raises(CheckpointError, match="is not replaced"):
        write_step(tmp_path, 20)
    assert inspect_step(newer).state == "unknown_format"


def test_a_step_without_a_component_that_the_run_needs_is_neither_chosen_nor_committed(
    tmp_path: Path,
) -> None:
    write_step(tmp_path, 10)
    with pytest.raises(CheckpointError, match="holds no state of orchestrator"):
        resolve_step(tmp_path, components=("trainer", "orchestrator"))
    record = msgspec.structs.replace(record_of(11, FILES), components=["trainer", "orchestrator"])
    with pytest.raises(CheckpointError, match="no file of component 'orchestrator' was recorded"):
        commit(write_partial(tmp_path, 11), tmp_path / "step_11", record)


def test_a_commit_refuses_files_that_are_not_those_that_were_written(tmp_path: Path) -> None:
    partial = write_partial(tmp_path, 5)
    (partial / "trainer/__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 5 bytes, 17 were recorded"):
        commit(partial, tmp_path / "step_5", record_of(5, FILES))
    (partial / "trainer/__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        commit(partial, tmp_path / "step_5", record_of(5, FILES))
    write_partial(tmp_path, 5)
    (partial / "trainer/__1_0.distcp").write_bytes(b"of another attempt")
    with pytest.raises(CheckpointError, match=r"trainer/__1_0\.distcp is not of this attempt"):
        commit(partial, tmp_path / "step_5", record_of(5, FILES))
    assert not (tmp_path / "step_5").exists()


def test_a_commit_replaces_a_broken_step_but_no_committed_one(tmp_path: Path) -> None:
    (write_step(tmp_path, 5) / "complete.json").unlink()
    assert inspect_step(write_step(tmp_path, 5)).state == "committed"
    with pytest.raises(CheckpointError, match="exists already"):
        write_step(tmp_path, 5)
    assert verify(tmp_path / "step_5") == []


def test_removal_deletes_the_whole_step_and_nothing_else(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    write_step(tmp_path, 2)
    remove_step(tmp_path / "step_1")
    remove_step(write_partial(tmp_path, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


@pytest.mark.parametrize("beside_a_new_attempt", [True, False])
def test_a_deletion_that_is_cut_short_leaves_no_step_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside_a_new_attempt: bool
) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    step = write_step(tmp_path, 5)
    if beside_a_new_attempt:
        write_partial(tmp_path, 5)
    monkeypatch.setattr("contract.commit.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_step(step)
    assert {entry.state for entry in scan(tmp_path)} == {"uncommitted"}
    assert not list(tmp_path.rglob("complete.json"))


def test_a_step_set_aside_is_whole_and_out_of_the_list(tmp_path: Path) -> None:
    first = set_aside(write_step(tmp_path, 5))
    second = set_aside(write_step(tmp_path, 5))
    assert scan(tmp_path) == []
    assert [str(path.relative_to(tmp_path)) for path in (first, second)] == [
        "superseded/step_5",
        "superseded_2/step_5",
    ]
    assert verify(first) == verify(second) == []


def test_verify_finds_damage_that_keeps_the_size(tmp_path: Path) -> None:
    step = write_step(tmp_path, 5)
    assert verify(step) == []
    content = bytearray((step / "trainer/__0_0.distcp").read_bytes())
    content[3] ^= 1
    (step / "trainer/__0_0.distcp").write_bytes(content)
    (problem,) = verify(step)
    assert problem.startswith("trainer/__0_0.distcp is damaged")
    assert inspect_step(step).state == "committed"
    (step / "trainer/__0_0.distcp").unlink()
    assert verify(step) == ["trainer/__0_0.distcp is missing"]


def test_a_renamed_step_is_not_taken_for_another_number_and_any_other_name_takes_its_own(
    tmp_path: Path,
) -> None:
    step = write_step(tmp_path, 5)
    step = step.rename(tmp_path / "step_6")
    assert inspect_step(step).problem == "complete.json is that of step 5"
    entry = inspect_step(step.rename(tmp_path / "best"))
    assert (entry.step, entry.problem) == (5, None)


def test_the_digest_of_a_configuration_ignores_order_and_sees_every_value() -> None:
    assert digest_config({"a": 1, "b": {"c": [1, 2]}}) == digest_config({"b": {"c": [1, 2]}, "a": 1})
    assert digest_config({"a": 1}) != digest_config({"a": 2})
