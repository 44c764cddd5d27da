"""What is particular to checkpoints in a local folder: the partial folder, the rename, moving aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.commit import inspect_step, remove_step, resolve_step, scan, scan_superseded, set_aside, verify
from contract.errors import CheckpointError
from contract.record import digest_config
from tests.unit.contract.places import LocalPlace


def write_partial(checkpoints: Path, step: int) -> Path:
    return LocalPlace(checkpoints).begin(step)


def write_step(checkpoints: Path, step: int) -> Path:
    place = LocalPlace(checkpoints)
    place.write_step(step)
    return checkpoints / f"step_{step}"


def test_a_partial_folder_never_counts_even_with_a_commit_record(tmp_path: Path) -> None:
    write_step(tmp_path, 10)
    newest = write_step(tmp_path, 20)
    newest.rename(newest.with_name("step_20.partial"))
    resolved = resolve_step(tmp_path)
    assert resolved is not None and resolved.entry.step == 10
    assert resolved.warnings == (
        "step_20.partial is not used: it was never committed: being written, or cut short",
    )


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


def test_a_commit_replaces_a_broken_step_but_no_committed_one(tmp_path: Path) -> None:
    (write_step(tmp_path, 5) / "complete.json").unlink()
    assert inspect_step(write_step(tmp_path, 5)).state == "committed"
    with pytest.raises(CheckpointError, match="exists already"):
        write_step(tmp_path, 5)
    assert verify(tmp_path / "step_5") == []


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
    assert first is not None and second is not None
    assert set_aside(tmp_path / "step_5") is None  # so that several can be set aside in repeated attempts
    assert scan(tmp_path) == []
    assert [entry.path for entry in scan_superseded(tmp_path)] == [first, second]
    assert [str(path.relative_to(tmp_path)) for path in (first, second)] == [
        "superseded/step_5",
        "superseded_2/step_5",
    ]
    assert verify(first) == verify(second) == []


def test_the_digest_of_a_configuration_ignores_order_and_sees_every_value() -> None:
    assert digest_config({"a": 1, "b": {"c": [1, 2]}}) == digest_config({"b": {"c": [1, 2]}, "a": 1})
    assert digest_config({"a": 1}) != digest_config({"a": 2})
