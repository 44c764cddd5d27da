"""The numbers of whole RL runs: one seed is one run, and an unchanged policy is what was sampled from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.layout import RunFolder
from tests.support.runs import Command, run_environment

_MODEL = Path(__file__).parents[2] / "configs" / "debug" / "model"
_SECONDS = 240.0

_CONFIG = """
run_name = "rl"
max_steps = 4
seq_len = 320
micro_batch_size = 4
export = {{}}

[model]
name = "{model}"

[deployment]
num_threads = 1

[optimizer]
type = "adamw"
lr = 1e-3

[[sources]]
environment = "sort-letters"
settings = {{ min_length = 3, max_length = 3, alphabet = "abcdefgh" }}

[[sources]]
environment = "tests.support.environments:Rounds"
settings = {{ min_length = 3, max_length = 3, alphabet = "abcdefgh" }}
num_workers = 2

[sampling]
max_tokens = 8

[rollout]
group_size = 4
groups_per_batch = 4
max_lead = 0

[inference]
num_threads = 1
engine = {{ type = "embedded", max_batch = 12 }}

[evaluation]
num_tasks = 4
interval = 2
num_printed = 0

[[evaluation.sources]]
environment = "sort-letters"
settings = {{ split = "test", min_length = 3, max_length = 3, alphabet = "abcdefgh" }}

[ckpt]
interval = 2
"""

# What tells of the clock, or of what else the machine does. Every other number belongs to the seed.
_OF_THE_CLOCK = {
    "time",
    "step_seconds",
    "tokens_per_second",
    "eta_seconds",
    "mfu",
    "memory_bytes",
    "checkpoint/write_seconds",
    "checkpoint/write_mb_per_s",
}
_OF_THE_CLOCK_PREFIXES = ("time/", "rate/")


def _run(root: Path, *flags: str) -> RunFolder:
    """A whole run by the command, to its end."""
    root.mkdir()
    config = root / "rl.toml"
    config.write_text(_CONFIG.format(model=_MODEL))
    words = [sys.executable, "-m", "launcher.rl", "@", str(config), "--output-dir", str(root), *flags]
    environment = {**run_environment(root / "cache"), "PYTHONPATH": str(Path(__file__).parents[2])}
    finished = Command(words, environment, root).wait(_SECONDS)
    assert finished.code == 0, finished.output
    return RunFolder(root / "rl")


def _records(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def _steps(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for record in _records(folder) if "loss" in record]


def _numbers(folder: RunFolder) -> list[dict[str, Any]]:
    """The metrics without those of the clock."""
    return [
        {
            name: value
            for name, value in record.items()
            if name not in _OF_THE_CLOCK and not name.startswith(_OF_THE_CLOCK_PREFIXES)
        }
        for record in _records(folder)
    ]


def _traces(folder: RunFolder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.rollouts.iterdir()}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run without a lead, of single turns and of several."""
    return _run(tmp_path_factory.mktemp("numbers") / "first")


@pytest.mark.timeout(300)
def test_without_a_lead_two_runs_of_one_seed_are_the_same_but_for_times(
    first: RunFolder, tmp_path: Path
) -> None:
    second = _run(tmp_path / "second")
    rewards = [record["reward/mean"] for record in _steps(first)]
    assert len(rewards) == 4 and len(set(rewards)) > 1
    turns = {(row["source"], row["num_turns"]) for row in _trained(first)}
    assert turns >= {("sort-letters", 1), ("Rounds", 3)}
    assert _numbers(first) == _numbers(second)
    assert _traces(first) == _traces(second)


@pytest.mark.timeout(300)
def test_every_update_of_a_synchronous_run_is_of_the_policy_that_sampled(first: RunFolder) -> None:
    for record in _steps(first):
        _check_on_policy(record)
        assert record["grad_norm"] > 0.01 and record["lr"] == 1e-3
    assert all(row["versions"] == [row["step"] - 1] * 2 for row in _trained(first))


@pytest.mark.timeout(300)
def test_a_policy_that_does_not_change_has_no_mismatch_however_old_its_samples_are(tmp_path: Path) -> None:
    flags = [
        "--optimizer.lr",
        "0",
        "--rollout.max-lead",
        "2",
        "--max-steps",
        "6",
        "--sampling.temperature",
        "0.7",
    ]
    folder = _run(tmp_path / "still", *flags, "--no-ckpt", "--no-evaluation")
    records = _steps(folder)
    assert len(records) == 6 and max(record["staleness/max"] for record in records) > 0
    for record in records:
        _check_on_policy(record)
    assert max(row["num_turns"] for row in _trained(folder)) == 3


def _trained(folder: RunFolder) -> list[dict[str, Any]]:
    """Every episode that was trained on."""
    texts = [path.read_text() for path in sorted(folder.rollouts.glob("step_*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _check_on_policy(record: dict[str, Any]) -> None:
    assert 0 <= record["mismatch_kl"] < 1e-6
    assert abs(record["ratio"] - 1) < 1e-5
    assert record["clip_fraction"] == 0
