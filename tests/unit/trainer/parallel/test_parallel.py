"""Devices, meshes, decisions of all ranks, and how a model is sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from contract.errors import ConfigError
from tests.support.engine import build_sharded, in_new_process, rank_process
from tests.support.ranks import run_ranks
from trainer.parallel.device import Device, open_device
from trainer.parallel.mesh import build_mesh
from trainer.parallel.process import open_process

CPU = Device(torch.device("cpu"))


def test_a_cpu_computes_in_float32_unless_it_is_told_otherwise() -> None:
    assert [CPU.compute_dtype(name) for name in ("auto", "float32", "bfloat16")] == [
        torch.float32, torch.float32, torch.bfloat16,
    ]  # fmt: skip
    assert (CPU.kind, CPU.backend, CPU.rng_state(), CPU.peak_memory_bytes(), CPU.total_memory_bytes()) == (
        "cpu", "gloo", None, None, None,
    )  # fmt: skip
    assert Device(torch.device("cuda", 0)).compute_dtype("auto") == torch.bfloat16
    assert CPU.measure_peak_tflops(torch.float32, size=64, seconds=0.02) > 0


def test_more_processes_than_gpus_are_refused_and_auto_takes_what_there_is() -> None:
    threads, has_gpu = torch.get_num_threads(), torch.cuda.is_available()
    message = "asks for one GPU per process" if has_gpu else "'cuda', but torch finds no usable GPU"
    try:
        with pytest.raises(ConfigError, match=message):
            open_device("cuda", 1000, None, 1001)
        assert open_device("auto", 0, 3, 1).kind == ("cuda" if has_gpu else "cpu")
        assert torch.get_num_threads() == 3
        open_device("cpu", 0, None, 10**6)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def check_mesh() -> tuple[list[tuple[str, ...]], list[tuple[int, ...]], str]:
    process = rank_process()
    meshes = [build_mesh(process, replicate) for replicate in (1, 2, 4)]
    with pytest.raises(ConfigError) as raised:
        build_mesh(process, 3)
    return [mesh.mesh_dim_names or () for mesh in meshes], [mesh.shape for mesh in meshes], str(raised.value)


def test_the_mesh_is_replicas_times_shards() -> None:
    for names, shapes, error in run_ranks(check_mesh, 4):
        assert names == [("dp_shard",), ("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard")]
        assert shapes == [(4,), (2, 2), (4, 1)]
        assert error == "deployment.dp_replicate = 3 does not divide the 4 ranks of this run"


def decide(folder: str) -> tuple[list[float], float, int, bool, list[int]]:
    process = rank_process()
    total = process.all_sum([float(process.rank), 2.0**53 - 1.0 if process.rank == 0 else 1.0])
    greatest = process.all_max(float(-process.rank))
    process.barrier()
    model = build_sharded(folder, process)
    parameters = list(model.parameters())
    assert all(isinstance(item, DTensor) for item in parameters)
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    local = [item.to_local().numel() for item in parameters if isinstance(item, DTensor)]
    return total, greatest, units, process.is_main, local


def test_all_ranks_decide_alike_and_share_every_parameter(tiny_llama: Path) -> None:
    first, second = run_ranks(decide, 2, str(tiny_llama))
    assert first[:2] == second[:2] == ([1.0, 2.0**53], 0.0)
    assert (first[2], first[3], second[3]) == (3, True, False)  # two blocks and the root
    whole = sum(item.numel() for item in build_plain(tiny_llama))
    assert sum(first[4]) + sum(second[4]) == whole and 0.4 < sum(first[4]) / whole < 0.6


def build_plain(folder: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return list(AutoModelForCausalLM.from_pretrained(folder).parameters())


def open_and_close() -> tuple[tuple[int, int, bool, float], bool, bool]:
    with open_process("cpu", num_threads=2, timeout_seconds=5) as process:
        was_open = dist.is_initialized() and process.all_sum([2.0]) == [2.0]
        assert torch.get_num_threads() == 2
        summary = (process.rank, process.world_size, process.is_main, process.timeout.total_seconds())
    try:
        with open_process("cpu", num_threads=1, timeout_seconds=5):
            raise KeyError("inside")
    except KeyError:
        pass
    return summary, was_open, dist.is_initialized()


def test_a_process_alone_needs_no_launcher_and_its_group_is_closed_on_every_end() -> None:
    summary, was_open, is_open = in_new_process(open_and_close)
    assert summary == (0, 1, True, 5.0) and was_open and not is_open


def limit_of(group: dist.ProcessGroup) -> float:
    """Seconds that a collective of `group` waits for a peer."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def limits_of_groups(write_timeout_seconds: float | None) -> list[float]:
    with open_process(
        "cpu", num_threads=1, timeout_seconds=5, write_timeout_seconds=write_timeout_seconds
    ) as process:
        before = process.background_group
        found = [limit_of(process.control_group), limit_of(before)]
        process.renew_background_group()
        assert process.background_group is not before
        dist.barrier(group=process.background_group)
        return [*found, limit_of(process.background_group)]


def test_a_collective_of_a_write_waits_twice_as_long_as_a_write_may_take_also_in_a_new_group() -> None:
    assert in_new_process(limits_of_groups, 40.0) == [5.0, 80.0, 80.0]
    assert in_new_process(limits_of_groups, None) == [5.0, 10.0, 10.0]
