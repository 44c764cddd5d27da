"""The commands that start one part of an RL run alone, up to what they refuse."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contract.attempt import register_rank
from contract.store import StoreFolder
from launcher import folder as run_folder
from launcher import parts

_FILE = """
max_steps = 3
[model]
name = "some/model"
"""


def test_a_trainer_alone_refuses_a_store_that_holds_steps_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trainer.toml"
    path.write_text(_FILE)
    url = f"memory://{tmp_path.name}"
    step = StoreFolder(url) / "rl" / "checkpoints" / "step_2"
    step.filesystem.pipe(f"{step}/complete.json", b"{}")
    assert parts.trainer(["@", str(path), "--output-dir", str(tmp_path / "out"), "--ckpt.url", url]) == 2
    assert "holds checkpoints already (the latest is step 2)" in capsys.readouterr().err
    assert not (tmp_path / "out" / "rl" / "logs").exists()


def test_a_trainer_alone_cleans_nothing_while_the_orchestrator_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trainer.toml"
    path.write_text(_FILE)
    root = tmp_path / "out" / "rl"
    attempt = root / "logs" / "attempt_1"
    attempt.mkdir(parents=True)
    (root / "logs" / "latest").symlink_to("attempt_1")
    (root / "metrics.jsonl").write_text("{}")
    register_rank(attempt, "orchestrator", os.getpid())
    assert parts.trainer(["@", str(path), "--output-dir", str(tmp_path / "out"), "--clean"]) == 2
    told = capsys.readouterr().err
    assert f"the orchestrator of the run in {root} is running (process {os.getpid()}" in told
    assert "nothing was deleted" in told and (root / "metrics.jsonl").exists() and attempt.exists()


def test_a_file_with_a_key_is_never_readable_by_others(tmp_path: Path) -> None:
    # The file that a process leaves which died while it wrote.
    left = tmp_path / ".rl.toml.partial"
    left.write_text("old")
    reader = left.open()
    for private, mode in ((True, 0o600), (False, 0o666 & ~_umask())):
        run_folder.write_text(tmp_path / "rl.toml", "api_key = 1", private=private)
        assert (tmp_path / "rl.toml").stat().st_mode & 0o777 == mode
    # Who had opened that one sees nothing of the new one.
    assert reader.read() == "old"
    reader.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rl.toml"]


def _umask() -> int:
    earlier = os.umask(0)
    os.umask(earlier)
    return earlier
