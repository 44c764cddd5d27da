"""The run folder before a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import RunFolderError
from contract.layout import RunFolder
from launcher.folder import check_usable, check_writable, clean_run, lock, new_attempt, write_config


def _run(root: Path) -> RunFolder:
    """A folder as a run leaves it, with some files that are not the run's."""
    folder = RunFolder(root)
    for path in (
        "checkpoints/step_20/complete.json",
        "checkpoints/step_40.partial/trainer/x",
        "weights/step_20/model",
        "config/sft.toml",
        "logs/attempt_1/rank_0.log",
        "traces/t.json",
        "metrics.jsonl",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("")
    (root / "logs" / "latest").symlink_to("attempt_1")
    return folder


def test_a_folder_that_holds_a_run_is_refused_unless_the_command_says_what_to_do(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"--resume.*--clean.*--run-name") as caught:
        check_usable(folder, resume=False, clean=False)
    assert caught.value.exit_code == 2
    check_usable(folder, resume=True, clean=False)
    check_usable(folder, resume=False, clean=True)
    check_usable(RunFolder(tmp_path / "new"), resume=False, clean=False)


def test_a_dry_run_alone_is_no_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_config(folder, "a = 1\n")
    check_usable(folder, resume=False, clean=False)


def test_clean_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run")
    outside = tmp_path / "outside"
    (outside / "step_1").mkdir(parents=True)
    (folder.root / "traces" / "link").symlink_to(outside)
    for path in ("notes.md", "checkpoints/best/model", "logs/mine.txt"):
        (folder.root / path).parent.mkdir(parents=True, exist_ok=True)
        (folder.root / path).write_text("")
    left = clean_run(folder)
    assert left == [folder.root / "checkpoints", folder.root / "logs", folder.root / "notes.md"]
    kept = sorted(str(path.relative_to(folder.root)) for path in folder.root.rglob("*") if path.is_file())
    assert kept == ["checkpoints/best/model", "logs/mine.txt", "notes.md"]
    assert (outside / "step_1").is_dir()


def test_clean_leaves_an_emptied_folder_where_all_was_the_runs(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run")
    assert clean_run(folder) == []
    assert list(folder.root.iterdir()) == []


def test_clean_of_a_folder_without_a_run_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.toml").write_text("")
    clean_run(RunFolder(tmp_path))
    assert (tmp_path / "config" / "mine.toml").exists()


def test_attempts_are_numbered_and_latest_points_to_the_newest(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = [new_attempt(folder).name for _ in range(2)]
    (folder.logs / "attempt_10").mkdir()
    assert [*names, new_attempt(folder).name] == ["attempt_1", "attempt_2", "attempt_11"]
    assert (folder.logs / "latest").resolve() == (folder.logs / "attempt_11").resolve()
    assert not (folder.logs / "latest").readlink().is_absolute()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file" / "run", Path("/proc/self/run")):
        with pytest.raises(RunFolderError, match=f"{root}.*choose another"):
            check_writable(RunFolder(root))
    with pytest.raises(RunFolderError, match="is a file"):
        check_usable(RunFolder(tmp_path / "file"), resume=False, clean=False)


def test_a_folder_in_which_a_run_goes_on_is_refused_until_that_run_ends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with lock(folder):
        with pytest.raises(RunFolderError, match="a run is going on"), lock(folder):
            pass
        # In another process too, and the lock leaves nothing that counts as a run.
        code = (
            "import sys; from pathlib import Path; from contract.layout import RunFolder\n"
            "from launcher import folder\n"
            "with folder.lock(RunFolder(Path(sys.argv[1]))): pass"
        )
        command = [sys.executable, "-c", code, str(folder.root)]
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert other.returncode != 0 and "a run is going on" in other.stderr
    with lock(folder):
        assert clean_run(folder) == []
