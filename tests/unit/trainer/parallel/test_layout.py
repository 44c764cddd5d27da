"""Where shards lie in the tensors of a checkpoint, against a plain split of the whole tensor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.engine import rank_process
from tests.support.ranks import run_ranks
from trainer.parallel.layout import LogicalTensor, Piece, Placement, Region, gather, local_part

# Borders that no equal cut of the 15 rows meets, on two or four ranks.
REGIONS = (Region("q", 0, 7), Region("k", 7, 10), Region("v", 10, 15))
SHAPE = (15, 6)


def whole_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def plain_split(regions: tuple[Region, ...], shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {region.name: whole_tensor(shape)[region.start : region.stop] for region in regions}


def shares(
    shape: tuple[int, ...], regions: tuple[Region, ...], dim: int, replicate: int
) -> tuple[list[tuple[str, tuple[int, ...], list[Any]]], bool]:
    """This rank's pieces, and whether all of them are views of its shard."""
    shard = [Shard(dim)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if replicate > 1:
        mesh = init_device_mesh("cpu", (replicate, dist.get_world_size() // replicate))
        shard = [Replicate(), Shard(dim)]
    parameter = distribute_tensor(whole_tensor(shape), mesh, shard)
    local = local_part(parameter)
    logical = Placement.of("packed", parameter, regions).logical(local)
    assert {name: item.shape for name, item in logical.items()} == {
        name: tuple(tensor.shape) for name, tensor in plain_split(regions, shape).items()
    }
    storage = local.untyped_storage().data_ptr()
    pieces = [(name, piece) for name, item in logical.items() for piece in item.pieces]
    return (
        [(name, piece.offsets, piece.tensor.tolist()) for name, piece in pieces],
        all(piece.tensor.untyped_storage().data_ptr() == storage for _, piece in pieces),
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_pieces_of_all_ranks_make_the_plain_split_of_a_packed_tensor(world_size: int, dim: int) -> None:
    ranks = run_ranks(shares, world_size, SHAPE, REGIONS, dim, 1)
    check_cover(ranks, REGIONS, SHAPE, copies=1)
    assert all(are_views for _, are_views in ranks)


def test_replicas_hold_the_same_pieces() -> None:
    check_cover(run_ranks(shares, 4, SHAPE, REGIONS, 0, 2), REGIONS, SHAPE, copies=2)


def test_ranks_beyond_the_last_row_hold_nothing() -> None:
    regions = (Region("a", 0, 1), Region("b", 1, 2))
    ranks = run_ranks(shares, 4, (2, 3), regions, 0, 1)
    check_cover(ranks, regions, (2, 3), copies=1)
    assert [len(pieces) for pieces, _ in ranks] == [1, 1, 0, 0]


def check_cover(
    ranks: list[Any], regions: tuple[Region, ...], shape: tuple[int, ...], *, copies: int
) -> None:
    """Every element is held `copies` times, and is what the plain split says."""
    expected = plain_split(regions, shape)
    counts = {name: torch.zeros(tensor.shape) for name, tensor in expected.items()}
    for name, offsets, values in (piece for pieces, _ in ranks for piece in pieces):
        block = torch.tensor(values)
        assert block.numel()
        for index in itertools.product(*(range(size) for size in block.shape)):
            place = tuple(start + step for start, step in zip(offsets, index, strict=True))
            assert block[index] == expected[name][place], (name, place)
            counts[name][place] += 1
    assert all(bool((count == copies).all()) for count in counts.values())


def test_a_parameter_that_is_not_packed_is_its_own_logical_tensor() -> None:
    tensor = torch.arange(6.0).view(3, 2).requires_grad_()
    placement = Placement.of("w", tensor)
    (piece,) = placement.logical(tensor, "host")["w"].pieces
    assert placement.names == ("w",) and piece.offsets == (0, 0)
    assert piece.tensor.data_ptr() == tensor.data_ptr() and not piece.tensor.requires_grad
    scalar = Placement.of("s", torch.tensor(2.0)).logical(torch.tensor(2.0))["s"]
    assert (scalar.shape, scalar.pieces[0].offsets, scalar.num_bytes) == ((), (), 4)
    with pytest.raises(AssertionError, match="is not"):
        placement.logical(torch.zeros(2, 2))


def gather_on_ranks() -> tuple[bool, bool]:
    process = rank_process()
    mesh = init_device_mesh("cpu", (process.world_size,))
    parameter = distribute_tensor(whole_tensor(SHAPE), mesh, [Shard(0)])
    assert isinstance(parameter, DTensor)
    logical = Placement.of("packed", parameter, REGIONS).logical(local_part(parameter))
    expected = plain_split(REGIONS, SHAPE)
    found = {name: gather(item, process) for name, item in logical.items()}
    alone = LogicalTensor((2,), torch.float32, (Piece((process.rank,), torch.full((1,), process.rank)),))
    numbers = gather(alone, process)
    if not process.is_main:
        return all(item is None for item in found.values()), numbers is None
    equal = [item is not None and torch.equal(item, expected[name]) for name, item in found.items()]
    return all(equal), numbers is not None and numbers.tolist() == [0.0, 1.0]


def test_gather_gives_whole_tensors_to_rank_0_alone() -> None:
    assert run_ranks(gather_on_ranks, 2) == [(True, True)] * 2
