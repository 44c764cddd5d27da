"""Where the parts of an RL run are placed."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import ConfigError
from contract.settings.load import load_settings
from launcher.devices import visible_gpus
from launcher.placement import place
from launcher.rl_config import RLConfig


def _config(*flags: str) -> RLConfig:
    base = ["--model.name", "m", "--max-steps", "1", "--sources", '[{"environment": "sort-letters"}]']
    return load_settings(RLConfig, [*base, *flags], prog="rl", description="").settings


def test_the_server_gets_the_last_gpu_and_the_trainer_the_others() -> None:
    placement = place(_config(), ["0", "1", "5", "7"], cores=16)
    assert (placement.server_gpu, placement.trainer_gpus, placement.num_ranks) == ("7", ["0", "1", "5"], 3)
    assert placement.trainer_environment()["CUDA_VISIBLE_DEVICES"] == "0,1,5"
    assert placement.server_environment()["CUDA_VISIBLE_DEVICES"] == "7"
    assert "OMP_WAIT_POLICY" not in placement.trainer_environment()


def test_a_gpu_that_is_set_for_the_server_is_not_the_trainers() -> None:
    placement = place(_config("--inference.device", "cuda:0"), ["a", "b", "c"], cores=8)
    assert (placement.server_gpu, placement.trainer_gpus) == ("a", ["b", "c"])


def test_one_gpu_is_shared_and_that_is_said() -> None:
    placement = place(_config(), ["3"], cores=8)
    assert (placement.server_gpu, placement.trainer_gpus, placement.num_ranks) == ("3", ["3"], 1)
    assert len(placement.notes) == 1 and "share" in placement.notes[0]


def test_without_a_server_to_start_the_trainer_has_all_gpus() -> None:
    placement = place(_config("--servers", '["http://a:1"]'), ["0", "1"], cores=8)
    assert (placement.server_gpu, placement.trainer_gpus, placement.num_ranks) == (None, ["0", "1"], 2)


@pytest.mark.parametrize(
    ("max_lead", "threads"), [("1", (4, 4)), ("0", (8, 8))], ids=["both at once", "taking turns"]
)
def test_cores_are_divided_only_if_both_compute_at_once(max_lead: str, threads: tuple[int, int]) -> None:
    placement = place(_config("--rollout.max-lead", max_lead), [], cores=8)
    assert (placement.server_threads, placement.trainer_threads) == threads
    assert placement.trainer_environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    assert placement.server_environment()["OMP_WAIT_POLICY"] == "PASSIVE"


def test_threads_that_are_set_stand() -> None:
    flags = ["--inference.num-threads", "3", "--deployment.num-threads", "5"]
    placement = place(_config(*flags), [], cores=2)
    assert (placement.server_threads, placement.trainer_threads) == (3, 5)


@pytest.mark.parametrize(
    ("flags", "gpus", "message"),
    [
        (["--deployment.num-processes", "3"], ["0", "1", "2"], "the trainer has 2 GPUs"),
        (["--inference.device", "cuda:2"], ["0", "1"], "shows 2 GPUs"),
        (["--inference.device", "cuda"], [], "shows no GPU"),
    ],
)
def test_devices_that_are_not_there_are_refused(flags: list[str], gpus: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(_config(*flags), gpus, cores=4)


def test_visible_gpus_are_named_as_cuda_names_them(tmp_path: Path) -> None:
    for index in range(4):
        (tmp_path / f"nvidia{index}").touch()
    (tmp_path / "nvidiactl").touch()
    assert visible_gpus({}, tmp_path) == ["0", "1", "2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1,9,0"}, tmp_path) == ["3", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-cd"}, tmp_path) == ["GPU-ab", "GPU-cd"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
