"""The command `sft` up to the start of training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract.errors import ConfigError
from contract.layout import RunFolder
from contract.settings.load import load_file, load_settings
from launcher import sft, sft_run
from trainer.config import SFTConfig

_ROOT = Path(__file__).parents[3]
_FAKE = ["--model.name", "m", "--data.type", "fake", "--max-steps", "3"]


@pytest.fixture(autouse=True)
def _no_outer_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _config(*argv: str) -> SFTConfig:
    return load_settings(SFTConfig, [*_FAKE, *argv], prog="sft", description="").settings


def test_the_shipped_configuration_passes_a_dry_run(tmp_path: Path) -> None:
    assert (
        sft.main(["@", str(_ROOT / "configs" / "qwen3.toml"), "--output-dir", str(tmp_path), "--dry-run"])
        == 0
    )


def test_a_dry_run_writes_the_resolved_configuration_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*_FAKE, "--output-dir", str(tmp_path), "--run-name", "r", "--no-ckpt", "--wandb"]
    assert sft.main([*argv, "--dry-run"]) == 0
    path = tmp_path / "r" / "config" / "sft.toml"
    assert str(path) in capsys.readouterr().out
    assert [entry.name for entry in (tmp_path / "r").rglob("*")] == ["config", "sft.toml"]
    assert load_file(SFTConfig, path) == load_settings(SFTConfig, argv, prog="sft", description="").settings


def test_a_dry_run_leaves_the_configuration_of_a_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "sft"
    (run / "config").mkdir(parents=True)
    (run / "config" / "sft.toml").write_text("of the run")
    (run / "metrics.jsonl").write_text("")
    assert sft.main([*_FAKE, "--output-dir", str(tmp_path), "--dry-run"]) == 0
    assert (run / "config" / "sft.toml").read_text() == "of the run"
    assert (run / "config" / "dry_run.toml").exists()
    assert "would be refused" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--dry-run", "--help"])
def test_the_quick_answers_import_no_torch(word: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom launcher.sft import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code, *_FAKE, "--output-dir", str(tmp_path), word],
        check=True,
        capture_output=True,
    )


def test_configuration_errors_exit_with_2_on_stderr_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sft.main([*_FAKE, "--max-step", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "did you mean --max-steps?" in captured.err and "Traceback" not in captured.err


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "metrics.jsonl").write_text("{}\n")
    assert sft.main([*_FAKE, "--output-dir", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "sft").iterdir()] == ["metrics.jsonl"]


def test_a_defaulted_number_of_processes_is_checked_like_a_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_run, "count_gpus", lambda: 3)
    with pytest.raises(
        ConfigError, match=r"data.batch_size = 8 .* deployment.num_processes = 3.*one per GPU"
    ):
        sft_run._number_of_processes(_config())
    with pytest.raises(ConfigError, match="dp_replicate = 2 does not divide"):
        sft_run._number_of_processes(_config("--data.batch-size", "9", "--deployment.dp-replicate", "2"))
    assert sft_run._number_of_processes(_config("--data.batch-size", "9")) == 3
    assert sft_run._number_of_processes(_config("--deployment.device", "cpu")) == 1
    assert sft_run._number_of_processes(_config("--deployment.num-processes", "2")) == 2


def test_a_contradiction_with_an_outer_torchrun_is_refused_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = [*_FAKE, "--output-dir", str(tmp_path)]
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert sft.main([*argv, "--deployment.num-processes", "4"]) == 2
        assert "torchrun started 2 processes" in capsys.readouterr().err
        assert sft.main([*argv, "--data.batch-size", "7"]) == 2
        assert "cannot be dealt evenly" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_under_an_outer_torchrun_only_rank_0_writes_and_others_follow_it(tmp_path: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    rank_0 = sft_run.OuterRank.from_environment(environment)
    rank_1 = sft_run.OuterRank.from_environment({**environment, "RANK": "1"})
    assert rank_0 is not None and rank_1 is not None and rank_0.local_world_size == 2
    folder = RunFolder(tmp_path / "sft")
    for name, launch_id, age in (("attempt_1", rank_0.launch_id, 3600), ("attempt_2", "another", 0)):
        (folder.logs / name).mkdir(parents=True)
        outer = folder.logs / name / "outer.json"
        outer.write_text(json.dumps({"launch_id": launch_id}))
        os.utime(outer, (time.time() - age, time.time() - age))
    config = _config("--output-dir", str(tmp_path))
    _, attempt = sft_run._prepare_as_rank(config, folder, rank_0)
    assert attempt.name == "attempt_3"
    assert sft_run._prepare_as_rank(config, folder, rank_1) == (attempt / "sft.toml", attempt)
    assert sft_run.OuterRank.from_environment({}) is None
