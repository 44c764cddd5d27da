"""What of which memory is written, by whom and in which order; and that any layout loads any other."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from contract.errors import CheckpointError
from contract.layout import RunFolder
from tests.support.ranks import run_ranks
from tests.support.resume import planned
from tests.unit.trainer.checkpoint.fakes import (
    FakeOwner,
    FakePart,
    Gate,
    open_async,
    process_of_rank,
    single_process,
)
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.reader import read_tensors
from trainer.checkpoint.tensors import own_storage
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.parallel.layout import Region

REGIONS = (Region("q", 0, 7), Region("k", 7, 10), Region("v", 10, 15))
WHOLE = torch.arange(15 * 6, dtype=torch.float32).view(15, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_view_of_a_slab_becomes_a_tensor_of_its_own_size_in_the_same_memory(dtype: torch.dtype) -> None:
    slab = torch.arange(60).to(dtype)
    for view in (slab[12:24].view(3, 4), slab[5], slab, slab[8:9]):
        own = own_storage(view)
        assert own.data_ptr() == view.data_ptr()
        assert (own.dtype, own.shape) == (view.dtype, view.shape) and torch.equal(own, view)
        assert own.untyped_storage().nbytes() == view.nbytes
    content = io.BytesIO()
    torch.save(own_storage(torch.zeros(1 << 20)[:16]), content)
    assert content.tell() < 4096  # not the slab


STATE = (("optimizer.", ".m"), ("optimizer.", ".v"))


def test_a_view_with_gaps_is_copied() -> None:
    view = torch.arange(12.0).view(3, 4)[:, 1:3]
    own = own_storage(view)
    assert own.is_contiguous() and torch.equal(own, view) and own.data_ptr() != view.data_ptr()


def layout_parts(layout: str, fill: float) -> dict[str, FakePart]:
    """One packed tensor (`packed 0`, `packed 1`: sharded on that dim) or the three that it is made of."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kind, dim = layout.split()

    def part(whole: torch.Tensor) -> FakePart:
        if kind == "packed":
            return FakePart({"p": distribute_tensor(whole, mesh, [Shard(int(dim))])}, packed={"p": REGIONS})
        return FakePart(
            {
                region.name: distribute_tensor(whole[region.start : region.stop], mesh, [Shard(int(dim))])
                for region in REGIONS
            }
        )

    return {"model": part(WHOLE * fill), "optimizer": part(-WHOLE * fill)}


def save_layout(root: str, layout: str) -> None:
    process = process_of_rank()
    parts = layout_parts(layout, 1.0)
    CheckpointManager(CheckpointConfig(), RunFolder(Path(root)), process, parts, {}).save(1).result()


def load_layout(root: str, layout: str) -> list[Any]:
    process, folder = process_of_rank(), RunFolder(Path(root))
    parts = layout_parts(layout, 0.0)
    manager = CheckpointManager(None, folder, process, parts, {})
    manager.load(planned(ResumeConfig(), folder, process, {}))
    wholes = []
    for part in parts.values():
        pieces = [tensor.full_tensor() for tensor in part.held.values() if isinstance(tensor, DTensor)]
        wholes.append(torch.cat(pieces).tolist())
    return wholes


@pytest.mark.parametrize(
    ("writers", "written", "readers", "read"),
    [
        (2, "packed 0", 1, "single 0"),
        (1, "single 0", 2, "packed 1"),
        (2, "packed 1", 3, "packed 0"),
        (3, "packed 0", 2, "single 1"),
        (2, "single 0", 2, "packed 0"),
    ],
)
def test_what_one_layout_and_world_size_saved_loads_in_another(
    tmp_path: Path, writers: int, written: str, readers: int, read: str
) -> None:
    run_ranks(save_layout, writers, str(tmp_path), written)
    for wholes in run_ranks(load_layout, readers, str(tmp_path), read):
        assert wholes == [WHOLE.tolist(), (-WHOLE).tolist()]


def order_in_file(folder: RunFolder) -> list[str]:
    """Names in the order in which the only writing thread wrote them."""
    stored = FileSystemReader(folder.checkpoints / "step_1" / "trainer").read_metadata().storage_data
    assert {place.relative_path for place in stored.values()} == {"__0_0.distcp"}
    return [index.fqn for index, _ in sorted(stored.items(), key=lambda item: item[1].offset)]


def test_weight_and_state_of_one_parameter_are_written_one_after_the_other(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with single_process() as process:
        parts = {
            "model": FakePart({"a.weight": torch.ones(5), "b.weight": torch.ones(5)}, residence="host"),
            "optimizer": FakePart(
                {f"{name}.weight.{key}": torch.ones(5) for key in ("m", "v") for name in "ab"},
                residence="host",
            ),
        }
        with open_async(process, folder, parts, Gate(), writer_threads=1) as manager:
            manager.save(1)
    names = [f"{part}{name}.weight{key}" for name in "ab" for part, key in (("model.", ""), *STATE)]
    assert order_in_file(folder) == [*names, "rng.rank_0"]


def test_what_was_copied_aside_is_written_last_as_nobody_waits_for_it(tmp_path: Path) -> None:
    folder, gate = RunFolder(tmp_path), Gate()
    state = {name: torch.full((500,), float(index)) for index, name in enumerate("abcd")}
    owner = FakeOwner(state.values())
    parts = {"optimizer": FakePart(state, residence="host"), "model": FakePart({"w": torch.ones(5)})}
    with single_process() as process:
        with open_async(
            process, folder, parts, gate, owner, writer_threads=1, async_buffer_gib=4096 / 2**30
        ) as manager:
            gate.close()
            manager.save(1)
            assert gate.reached.wait(30)  # it is at a
            assert owner.hold is not None
            owner.hold.wait([state["b"], state["c"]])
            state["b"].fill_(-1.0)
            state["c"].fill_(-1.0)
            gate.open.set()
        saved = read_tensors(folder.checkpoints / "step_1", "optimizer")
    assert order_in_file(folder) == [
        "optimizer.a", "optimizer.d", "model.w", "rng.rank_0", "optimizer.b", "optimizer.c",
    ]  # fmt: skip
    assert [float(saved[name][0]) for name in "abcd"] == [0.0, 1.0, 2.0, 3.0]


def test_what_owners_wait_for_is_written_first_and_private_copies_last(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with single_process() as process:
        parts = {
            "model": FakePart({f"w{index}": torch.ones(50) for index in range(3)}),
            "optimizer": FakePart({f"m{size}": torch.ones(size) for size in (3, 900, 20)}, residence="host"),
            "masters": FakePart({"x": torch.ones(1)}, residence="host"),
        }
        with open_async(process, folder, parts, Gate(), writer_threads=1) as manager:
            manager.save(1)
    order = order_in_file(folder)
    held = ["optimizer.m3", "optimizer.m900", "optimizer.m20", "masters.x"]
    assert order == [*held, "model.w0", "model.w1", "model.w2", "rng.rank_0"]


def free_names(root: str) -> list[str]:
    """Host tensors that this rank may change while no byte of any rank has been written."""
    process, gate = process_of_rank(), Gate()
    state = {"a": torch.ones(100), "b": torch.ones(100)}
    owner = FakeOwner(state.values())
    parts = {"optimizer": FakePart(state, residence="host")}
    manager = open_async(process, RunFolder(Path(root)), parts, gate, owner, writer_threads=1)
    gate.close()
    manager.save(1)
    assert gate.reached.wait(30)
    hold = owner.hold
    assert hold is not None
    found = []
    for name, tensor in state.items():
        waiter = threading.Thread(target=hold.wait, args=([tensor],), daemon=True)
        waiter.start()
        waiter.join(1.0)
        if not waiter.is_alive():
            found.append(name)
    process.barrier()
    gate.open.set()
    manager.wait()
    return found


def test_a_rank_lets_go_at_once_of_the_replicas_that_another_rank_writes(tmp_path: Path) -> None:
    found = run_ranks(free_names, 2, str(tmp_path))
    assert sorted(found) == [["a"], ["b"]]


@pytest.mark.parametrize("name", ["weight", "bound"])
def test_a_buffer_of_the_model_may_hold_infinity_and_a_parameter_may_not(tmp_path: Path, name: str) -> None:
    tensors = {"weight": torch.ones(3), "bound": torch.ones(3)}
    tensors[name][1] = float("inf")
    folder = RunFolder(tmp_path)
    with single_process() as process:
        manager = CheckpointManager(
            CheckpointConfig(), folder, process, {"model": FakePart(tensors)}, {}, model_buffers={"bound"}
        )
        manager.save(1)
        if name == "weight":
            with pytest.raises(CheckpointError, match="the weight weight holds NaN or infinity"):
                manager.wait()
        else:
            manager.wait()
            saved = read_tensors(folder.checkpoints / "step_1", "model")
            assert torch.equal(saved["bound"], tensors["bound"])
