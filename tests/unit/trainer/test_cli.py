"""One training process from configuration to exit code, in a process of its own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.attempt import read_exit, read_pid
from tests.support.engine import in_new_process


def write_config(folder: Path, model_folder: Path, **sections: dict[str, Any]) -> Path:
    base: dict[str, dict[str, Any]] = {
        "model": {"name": str(model_folder), "init": "random"},
        "data": {"type": "fake", "seq_len": 16, "batch_size": 2},
        "log": {"live": False, "peak_tflops": 1.0},
        "deployment": {"device": "cpu", "num_threads": 1},
    }
    lines = [f'output_dir = "{folder}"', "max_steps = 2"]
    for name, section in {**base, **sections}.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    path = folder / "sft.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def run_cli(config_path: str, attempt_dir: str) -> tuple[int, int]:
    """The exit code, and how many handlers the root logger was left with."""
    from trainer.cli import run

    return run(Path(config_path), Path(attempt_dir)), len(logging.getLogger().handlers)


def attempt(folder: Path, config_path: Path) -> tuple[int, Any]:
    place = folder / "sft" / "logs" / "attempt_1"
    place.mkdir(parents=True)
    code, _ = in_new_process(run_cli, str(config_path), str(place), timeout=120)
    assert read_pid(place, 0) is not None and (place / "trainer_0.log").is_file()
    return code, read_exit(place, 0)


def test_a_run_that_comes_to_its_end_exits_with_0_and_says_so(tmp_path: Path, tiny_llama: Path) -> None:
    code, record = attempt(tmp_path, write_config(tmp_path, tiny_llama))
    assert (code, record.code, record.message) == (0, 0, "")
    steps = [json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert [item["step"] for item in steps if "loss" in item] == [1, 2]
    assert (tmp_path / "sft" / "checkpoints" / "step_2" / "complete.json").is_file()
    assert (tmp_path / "sft" / "weights" / "step_2" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("sections", "code", "message"),
    [
        ({"model": {"name": "/missing/model"}}, 2, "model.name = '/missing/model': no such file or folder"),
        (
            {"deployment": {"device": "cpu", "dp_replicate": 2}},
            2,
            "deployment.dp_replicate = 2 does not divide",
        ),
        ({"resume": {"step": 3}}, 1, "cannot resume: there is no step 3"),
    ],
)
def test_an_error_gives_its_exit_code_and_its_one_message(
    sections: dict[str, Any], code: int, message: str, tmp_path: Path, tiny_llama: Path
) -> None:
    exit_code, record = attempt(tmp_path, write_config(tmp_path, tiny_llama, **sections))
    assert (exit_code, record.code) == (code, code)
    assert message in record.message


SLOW_WRITE = """
import sys
from pathlib import Path
import torch
from trainer.checkpoint.inflight import InFlight

def write():
    weights = torch.ones(3_000_000)
    while True:
        weights.sum()

InFlight(None).start(1, write, None, in_background=True)
from trainer.cli import run
sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def test_a_write_that_was_given_up_and_goes_on_does_not_change_the_exit_code(
    tmp_path: Path, tiny_llama: Path
) -> None:
    config = write_config(tmp_path, tiny_llama, model={"name": "/missing/model"})
    place = tmp_path / "sft" / "logs" / "attempt_1"
    place.mkdir(parents=True)
    words = [sys.executable, "-c", SLOW_WRITE, str(config), str(place)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert "no such file or folder" in ended.stderr
    assert "terminate" not in ended.stderr


def test_an_error_is_told_though_its_record_cannot_be_written(tmp_path: Path, tiny_llama: Path) -> None:
    config = write_config(tmp_path, tiny_llama, model={"name": "/missing/model"})
    place = tmp_path / "sft" / "logs" / "attempt_1"
    (place / "rank_0.exit.json").mkdir(parents=True)
    code, _ = in_new_process(run_cli, str(config), str(place), timeout=120)
    assert code == 2
    assert "no such file or folder" in (place / "trainer_0.log").read_text()
