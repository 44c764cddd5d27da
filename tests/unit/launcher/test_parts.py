"""The commands that start one part of an RL run alone, up to what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.store import StoreFolder
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
