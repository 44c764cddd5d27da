"""The `ckpt` command on runs that the checkpoint manager wrote."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from contract.commit import scan
from contract.layout import RunFolder
from contract.settings.dump import to_toml
from launcher.ckpt import main
from tests.support.tiny_model import write_tiny_model
from tests.unit.trainer.checkpoint.fakes import FakePart, single_process
from trainer.checkpoint.manager import CheckpointManager
from trainer.config import SFTConfig
from trainer.config.checkpoint import CheckpointConfig
from trainer.config.data import FakeDataConfig
from trainer.config.model import ModelConfig
from trainer.parallel.process import Process


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with single_process() as opened:
        yield opened


def write_run(
    root: Path, process: Process, steps: list[int], config: dict[str, Any] | None = None, **weights: Any
) -> None:
    part = FakePart(weights or {"w": torch.arange(1000.0)})
    manager = CheckpointManager(CheckpointConfig(), RunFolder(root), process, {"model": part}, config or {})
    for step in steps:
        manager.save(step)


def shard_of(root: Path, step: int) -> Path:
    files = (root / "checkpoints" / f"step_{step}" / "trainer").glob("*.distcp")
    return max(files, key=lambda path: path.stat().st_size)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("ckpt", [CheckpointConfig(), None])
def test_the_steps_of_a_run_without_a_store_are_found_by_the_configuration_that_it_writes(
    tmp_path: Path, process: Process, capsys: pytest.CaptureFixture[str], ckpt: CheckpointConfig | None
) -> None:
    write_run(tmp_path, process, [9])
    config = SFTConfig(max_steps=1, model=ModelConfig(name="m"), data=FakeDataConfig(type="fake"), ckpt=ckpt)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "sft.toml").write_text(to_toml(config, header="of a run"))
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "9"


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_ls_shows_each_step_and_why_it_cannot_be_loaded(
    tmp_path: Path, process: Process, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    write_run(tmp_path, process, [9, 10])
    shard_of(tmp_path, 9).unlink()
    (tmp_path / "checkpoints" / "step_11.partial").mkdir()
    assert main(["ls", str(tmp_path / place)]) == 0
    header, nine, ten, eleven = capsys.readouterr().out.splitlines()
    assert header.split() == ["STEP", "SIZE", "FILES", "CREATED", "RANKS", "STATUS"]
    assert nine.startswith("9 ") and "is missing" in nine and "damaged" in nine
    assert ten.split()[:2] == ["10", "0.0"] and ten.endswith("1      committed")
    assert eleven.startswith("11 ") and "uncommitted: it was never committed" in eleven


def test_verify_passes_what_is_whole_and_tells_what_was_never_committed(
    tmp_path: Path, process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, process, [1, 2])
    (tmp_path / "checkpoints" / "step_3.partial").mkdir()
    assert main(["verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "step_1: ok",
        "step_2: ok",
        "step_3.partial: not committed",
    ]
    assert main(["verify", str(tmp_path), "--step", "3"]) == 1


def test_verify_fails_on_one_changed_byte_and_names_the_file(
    tmp_path: Path, process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, process, [1, 2])
    damage(shard_of(tmp_path, 2))
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "step_1: ok" in out and f"step_2: trainer/{shard_of(tmp_path, 2).name} is damaged" in out
    assert main(["verify", str(tmp_path), "--step", "1"]) == 0
    assert main(["verify", str(tmp_path / "checkpoints" / "step_2")]) == 1


def test_rm_deletes_steps_but_the_last_one_that_loads_only_by_force(
    tmp_path: Path, process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, process, [1, 2, 3])
    (tmp_path / "checkpoints" / "step_4.partial").mkdir()
    assert main(["rm", str(tmp_path), "--step", "1", "4"]) == 0
    assert [entry.step for entry in scan(tmp_path / "checkpoints")] == [2, 3]
    assert main(["rm", str(tmp_path), "--step", "2", "3"]) == 1
    assert "--force" in capsys.readouterr().err
    assert [entry.step for entry in scan(tmp_path / "checkpoints")] == [2, 3]
    assert main(["rm", str(tmp_path), "--step", "7"]) == 1
    assert "there is no step 7" in capsys.readouterr().err
    assert main(["rm", str(tmp_path), "--step", "2", "3", "--force"]) == 0
    assert scan(tmp_path / "checkpoints") == []


def test_a_folder_without_checkpoints_is_one_readable_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["ls"], ["verify"], ["export"], ["rm", "--step", "1"]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 1
        assert "holds no checkpoints" in capsys.readouterr().err
    assert main(["ls", str(tmp_path / "nowhere")]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_export_writes_any_committed_step_as_a_model_that_transformers_loads(
    tmp_path: Path, process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = write_tiny_model(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weights = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    config = {"model": ModelConfig(name=str(source), chat_template="{{ messages }}!").model_dump(mode="json")}
    run = tmp_path / "run"
    write_run(run, process, [5, 6], config, **weights)
    assert main(["export", str(run), "--step", "5"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(run / "weights" / "step_5", dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert AutoTokenizer.from_pretrained(run / "weights" / "step_5").chat_template == "{{ messages }}!"
    capsys.readouterr()
    assert main(["export", str(run), "--step", "5"]) == 2
    assert "--force" in capsys.readouterr().err
    out = tmp_path / "elsewhere"
    assert (
        main(["export", str(run / "checkpoints" / "step_6"), "--out", str(out), "--dtype", "bfloat16"]) == 0
    )
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    damage(shard_of(run, 6))
    assert main(["export", str(run), "--out", str(tmp_path / "third")]) == 1
    assert "is damaged and is not exported" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


def test_listing_and_help_import_no_torch(tmp_path: Path, process: Process) -> None:
    write_run(tmp_path, process, [1])
    program = (
        "import sys\nfrom launcher.ckpt import main\n"
        f"assert main(['ls', {str(tmp_path)!r}]) == main(['verify', {str(tmp_path)!r}]) == 0\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["sft.toml", "trainer.toml"])
def test_the_store_of_a_run_is_found_by_the_configuration_of_either_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = tmp_path / "run"
    (run / "config").mkdir(parents=True)
    text = 'run_name = "run"\n[ckpt]\nurl = "memory://place"\n'
    (run / "config" / name).write_text(text)
    store = fsspec.filesystem("memory")
    store.pipe("/place/run/checkpoints/step_7/complete.json", b"{}")
    try:
        main(["ls", str(run)])
    finally:
        store.rm("/place", recursive=True)
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "7"
