"""Saving and loading by several ranks, and what happens when one of them fails."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from contract.commit import inspect_step, scan, verify
from contract.errors import CheckpointError
from contract.layout import RunFolder
from tests.support.ranks import run_ranks
from tests.support.resume import planned
from tests.unit.trainer.checkpoint.fakes import FakePart, process_of_rank
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.reader import read_tensors
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig

# Rows that two and three ranks cannot share evenly, and fewer rows than ranks.
SHAPES = {"w": (7, 64), "head": (1, 8), "bias": (6,)}


def full_tensors(fill: float) -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape) * fill for name, shape in SHAPES.items()
    }


def sharded_parts(fill: float) -> dict[str, FakePart]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full_tensors(fill).items()
    }
    optimizer = FakePart({"m.w": weights["w"] * 2.0, "step": torch.tensor(fill)}, {"lr": fill})
    return {"model": FakePart(weights), "optimizer": optimizer, "progress": FakePart({}, {"step": int(fill)})}


def save_on_ranks(root: str, *steps: int) -> float:
    process = process_of_rank()
    manager = CheckpointManager(
        CheckpointConfig(), RunFolder(Path(root)), process, sharded_parts(3.0), {"seed": 1}
    )
    random.seed(process.rank)
    for step in steps:
        assert manager.save(step) is not None
    return random.random()


def load_on_ranks(root: str) -> tuple[dict[str, Any], dict[str, float], float]:
    """Whole tensors as lists (a tensor would travel as shared memory, which ends with the rank)."""
    process = process_of_rank()
    parts = sharded_parts(0.0)
    manager = CheckpointManager(None, RunFolder(Path(root)), process, parts, {"seed": 1})
    manager.load(planned(ResumeConfig(), RunFolder(Path(root)), process, {"seed": 1}))
    held = {**parts["model"].held, **parts["optimizer"].held}
    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()
        for name, tensor in held.items()
    }
    return whole, parts["optimizer"].held_values, random.random()


def check_loaded(loaded: tuple[dict[str, Any], dict[str, float], float]) -> None:
    tensors, values, _ = loaded
    expected = full_tensors(3.0)
    for name, tensor in expected.items():
        assert tensors[name] == tensor.tolist(), name
    assert tensors["m.w"] == (expected["w"] * 2.0).tolist()
    assert (tensors["step"], values) == (3.0, {"lr": 3.0})


def test_a_checkpoint_of_two_ranks_loads_on_one_two_and_three(tmp_path: Path) -> None:
    next_numbers = run_ranks(save_on_ranks, 2, str(tmp_path), 5)
    step = tmp_path / "checkpoints" / "step_5"
    assert verify(step) == []
    record = inspect_step(step).record
    assert record is not None
    assert record.world_size == 2
    assert {name.split("_")[2] for name in record.files if name.endswith(".distcp")} == {"0", "1"}
    for world_size in (1, 2, 3):
        loaded = run_ranks(load_on_ranks, world_size, str(tmp_path))
        for of_rank in loaded:
            check_loaded(of_rank)
        numbers = [number for _, _, number in loaded]
        if world_size == 2:
            assert numbers == next_numbers  # each rank goes on with its own generator
        else:
            assert len(set(numbers)) == world_size and not set(numbers) & set(next_numbers)


def test_a_checkpoint_of_one_rank_loads_on_two_and_without_any_group(tmp_path: Path) -> None:
    run_ranks(save_on_ranks, 1, str(tmp_path), 5)
    for of_rank in run_ranks(load_on_ranks, 2, str(tmp_path)):
        check_loaded(of_rank)
    alone = read_tensors(tmp_path / "checkpoints" / "step_5", "model")
    assert alone.keys() == SHAPES.keys()
    assert all(torch.equal(alone[name], tensor) for name, tensor in full_tensors(3.0).items())


def fail_on_rank_1(root: str, kind: str) -> str:
    process = process_of_rank()
    parts = sharded_parts(3.0)
    # Larger than any buffer, so that a write fails in the middle of a tensor.
    parts["optimizer"].held["big"] = distribute_tensor(
        torch.zeros(2, 600_000), init_device_mesh("cpu", (2,)), [Shard(0)]
    )
    manager = CheckpointManager(CheckpointConfig(keep_last=1), RunFolder(Path(root)), process, parts, {})
    manager.save(1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if process.rank == 1:
        if kind == "file too large":
            # Python ignores SIGXFSZ, so a write beyond the limit is an OSError, as on a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limit))
        else:
            weight = parts["model"].held["w"]
            assert isinstance(weight, DTensor)
            weight.to_local()[0, 0] = float("nan")
    try:
        manager.save(2)
        manager.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        if process.rank == 1 and kind == "file too large":
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return "saved"


def test_a_write_that_fails_on_one_rank_is_raised_on_all_and_leaves_nothing_behind(tmp_path: Path) -> None:
    first, second = run_ranks(fail_on_rank_1, 2, str(tmp_path), "file too large", timeout=60)
    for message in (first, second):
        assert message.startswith(
            "checkpoint of step 2 was not saved, earlier ones are unchanged: "
            "rank 1: the file is larger than this process or file system allows"
        )
        assert "it needs 6.0 MB" in message
    assert "were free when it stopped" in first
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    assert verify(tmp_path / "checkpoints" / "step_1") == []


def test_a_weight_that_is_not_finite_on_one_rank_stops_the_save_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(fail_on_rank_1, 2, str(tmp_path), "nan", timeout=60)
    assert first.startswith(second.removesuffix(")"))
    assert "rank 1: the weight w holds NaN or infinity" in first
    assert [entry.path.name for entry in scan(tmp_path / "checkpoints")] == ["step_1"]


def test_a_step_that_lacks_the_file_of_one_rank_is_not_chosen(tmp_path: Path) -> None:
    run_ranks(save_on_ranks, 2, str(tmp_path), 5, 6)
    next((tmp_path / "checkpoints" / "step_6" / "trainer").glob("__1_*.distcp")).unlink()
    assert inspect_step(tmp_path / "checkpoints" / "step_6").state == "damaged"
    for of_rank in run_ranks(load_on_ranks, 2, str(tmp_path)):
        check_loaded(of_rank)
