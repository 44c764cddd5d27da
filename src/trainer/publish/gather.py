"""Weights of all ranks on the first one, bucket by bucket.

No rank holds a full copy: rank 0 holds the bucket at hand (and its part of the next), the others their part
of it. Names are those of the parameters of the transformers model, because the policy server puts the tensors
into such a model; transformers saves some architectures (fused experts) under other names in files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from contract.broadcast import DTYPE_BYTES, Bucket, cut, view
from contract.errors import PublishError
from contract.policy import TensorInfo
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process

Offsets = tuple[int, ...]
_ALIGNMENT = max(DTYPE_BYTES.values())


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor, as a rank holds it."""

    offsets: Offsets
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of one tensor."""

    info: TensorInfo
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Who sends what; equal on every rank.

    Attributes:
        blocks: for each tensor by name and each rank, the blocks that this rank sends: of equal blocks on
            several ranks, that of the first.
    """

    buckets: tuple[Bucket, ...]
    blocks: Mapping[str, Sequence[Sequence[Block]]]

    @property
    def tensors(self) -> list[TensorInfo]:
        """In order of the buckets."""
        return [slot.tensor for bucket in self.buckets for slot in bucket.slots]


def make_plan(
    weights: Mapping[str, LogicalTensor], dtype: torch.dtype, bucket_bytes: int, process: Process
) -> GatherPlan:
    """Agree with all ranks on a plan; collective.

    Args:
        dtype: in which floating-point weights travel.

    Raises:
        PublishError: the shares of the ranks do not make up the tensors; raised on every rank.
    """
    mine = {name: _share(name, tensor, dtype) for name, tensor in weights.items()}
    of_ranks: list[dict[str, Share]] = [{} for _ in range(process.world_size)]
    dist.all_gather_object(of_ranks, mine, group=process.control_group)
    first = of_ranks[0]
    for rank, shares in enumerate(of_ranks):
        if {name: share.info for name, share in shares.items()} != {n: s.info for n, s in first.items()}:
            raise PublishError(f"rank {rank} holds other weights than rank 0; nothing was published")
    if not first:
        raise PublishError("the model has no weights; nothing was published")
    unknown = sorted({share.info.dtype for share in first.values()} - DTYPE_BYTES.keys())
    if unknown:
        raise PublishError(f"weights of type {unknown[0]} cannot be published")
    blocks = {name: _senders([shares[name] for shares in of_ranks]) for name in first}
    # By element size, so that every tensor of a bucket is aligned in its buffer.
    infos = sorted((share.info for share in first.values()), key=lambda info: -DTYPE_BYTES[info.dtype])
    return GatherPlan(tuple(cut(infos, bucket_bytes)), blocks)


def pack(
    plan: GatherPlan, bucket: Bucket, weights: Mapping[str, LogicalTensor], process: Process
) -> torch.Tensor:
    """This rank's part of `bucket` as one buffer (uint8), where `collect` takes it."""
    parts = _parts(plan, bucket, process.rank)
    flat = _empty(_size(parts), process)
    for part in parts:
        source = weights[part.name]
        block = next(piece.tensor for piece in source.pieces if piece.offsets == part.block.offsets)
        part.view(flat).copy_(block)
    return flat


def collect(plan: GatherPlan, bucket: Bucket, mine: torch.Tensor, process: Process) -> torch.Tensor | None:
    """The whole bucket on rank 0 (on its GPU, or on the host), None elsewhere; collective.

    Args:
        mine: what `pack` gave on this rank.

    Raises:
        RuntimeError: a rank is lost.
    """
    of_ranks = [_parts(plan, bucket, rank) for rank in range(process.world_size)]
    sizes = [_size(parts) for parts in of_ranks]
    if not any(sizes[1:]) and all(len(plan.blocks[s.tensor.name][0]) == 1 for s in bucket.slots):
        return mine[: bucket.num_bytes] if process.is_main else None
    received = _send_to_first(mine, sizes, process)
    if received is None:
        return None
    whole = _empty(bucket.num_bytes, process)
    tensors = {slot.tensor.name: view(whole, slot) for slot in bucket.slots}
    for parts, flat in zip(of_ranks, received.split(sizes), strict=True):
        for part in parts:
            ends = zip(part.block.offsets, part.block.shape, strict=True)
            place = tuple(slice(start, start + size) for start, size in ends)
            tensors[part.name][place].copy_(part.view(flat))
    return whole


def _send_to_first(mine: torch.Tensor, sizes: Sequence[int], process: Process) -> torch.Tensor | None:
    """`mine` of every rank, end to end, on rank 0; collective, for ranks that send nothing too."""
    received = _empty(sum(sizes) if process.is_main else 0, process)
    nothing = [0] * (process.world_size - 1)
    dist.all_to_all_single(
        received,
        mine,
        output_split_sizes=list(sizes) if process.is_main else [0, *nothing],
        input_split_sizes=[mine.numel(), *nothing],
        group=None if mine.is_cuda else process.control_group,
    )
    return received if process.is_main else None


def _empty(num_bytes: int, process: Process) -> torch.Tensor:
    # Between GPUs if there are several: a way through the hosts and gloo is many times slower.
    is_between_gpus = process.device.kind == "cuda" and process.world_size > 1
    allocate = process.device.empty if is_between_gpus else process.device.empty_on_host
    return allocate((num_bytes,), torch.uint8)


@dataclass(frozen=True, slots=True)
class _Part:
    """Place of a block in the buffer of the rank that sends it, in bytes."""

    name: str
    dtype: torch.dtype
    block: Block
    start: int
    stop: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.stop].view(self.dtype).view(self.block.shape)


def _parts(plan: GatherPlan, bucket: Bucket, rank: int) -> list[_Part]:
    parts, start = [], 0
    for slot in bucket.slots:
        info = slot.tensor
        for block in plan.blocks[info.name][rank]:
            stop = start + math.prod(block.shape) * DTYPE_BYTES[info.dtype]
            parts.append(_Part(info.name, getattr(torch, info.dtype), block, start, stop))
            start = stop
    return parts


def _size(parts: Sequence[_Part]) -> int:
    """Bytes of a rank's buffer: all begin where any type of number may, when they lie end to end."""
    stop = parts[-1].stop if parts else 0
    return -(-stop // _ALIGNMENT) * _ALIGNMENT


def _share(name: str, tensor: LogicalTensor, dtype: torch.dtype) -> Share:
    wire = dtype if tensor.dtype.is_floating_point else tensor.dtype
    blocks = tuple(Block(piece.offsets, tuple(piece.tensor.shape)) for piece in tensor.pieces)
    return Share(TensorInfo(name, str(wire).removeprefix("torch."), list(tensor.shape)), blocks)


def _senders(shares: Sequence[Share]) -> list[list[Block]]:
    """The blocks that each rank sends of one tensor."""
    seen: set[Offsets] = set()
    chosen: list[list[Block]] = []
    for share in shares:
        chosen.append([block for block in share.blocks if block.offsets not in seen])
        seen |= {block.offsets for block in share.blocks}
    info = shares[0].info
    found = sum(math.prod(block.shape) for blocks in chosen for block in blocks)
    if found != math.prod(info.shape):
        raise PublishError(
            f"the ranks hold {found} elements of {info.name}, which has {math.prod(info.shape)}; nothing was "
            f"published"
        )
    return chosen
