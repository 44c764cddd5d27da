"""Where the data of this rank lies inside the tensors of a checkpoint.

A run may hold a parameter sharded over ranks, packed with others into one (fused projections), on the device
or on the host. A checkpoint knows none of that: it holds *logical* tensors under their Hugging Face names.
This module maps one to the other without communication: a rank describes its share as views into its own
memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.parallel.process import Process

Residence = Literal["device", "host", "fresh"]
"""Who may change the memory of a tensor while it is written: the next step (`device`), its owner after the
hold has let it go (`host`), or nobody (`fresh`)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a logical tensor: `tensor` (a view) holds the elements from `offsets` on."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """This rank's share of one tensor of a checkpoint.

    Attributes:
        shape: of the whole tensor.
        pieces: disjoint blocks that this rank holds, none empty. Blocks of different ranks are disjoint or
            equal
            (replicas), and together they cover the tensor.
        residence: whose memory the pieces are views of.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    residence: Residence = "device"

    @classmethod
    def replicated(cls, tensor: torch.Tensor, residence: Residence = "device") -> LogicalTensor:
        """A tensor that every rank holds whole."""
        piece = Piece((0,) * tensor.ndim, tensor.detach())
        return cls(tuple(tensor.shape), tensor.dtype, (piece,), residence)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Region:
    """Rows `start` to `stop` of a run-time parameter are the logical tensor `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this rank's shard of one run-time parameter lies in the logical tensors that it is made of.

    Attributes:
        shape: of the whole run-time parameter.
        local_shape: of this rank's shard.
        offsets: of this rank's shard in the run-time parameter.
        regions: in order; they cover all rows.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    regions: tuple[Region, ...]

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor, regions: Sequence[Region] = ()) -> Placement:
        """The placement of `parameter` (a DTensor, or a tensor that every rank holds whole).

        Args:
            name: its logical name, where it is a logical tensor itself.
            regions: what it is packed from, if it is packed.
        """
        shape = tuple(parameter.shape)
        if isinstance(parameter, DTensor):
            local, start = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            local_shape, offsets = tuple(local), tuple(start)
        else:
            local_shape, offsets = shape, (0,) * len(shape)
        whole = Region(name, 0, shape[0] if shape else 1)
        return cls(shape, local_shape, offsets, tuple(regions) or (whole,))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the logical tensors."""
        return tuple(region.name for region in self.regions)

    def logical(self, local: torch.Tensor, residence: Residence = "device") -> dict[str, LogicalTensor]:
        """Views of `local` (this rank's shard, `local_shape`) as shares of the logical tensors, by name."""
        assert tuple(local.shape) == self.local_shape, f"{tuple(local.shape)} is not {self.local_shape}"
        local = local.detach()
        if not self.shape:
            return {self.names[0]: LogicalTensor.replicated(local, residence)}
        return {region.name: self._cut(local, region, residence) for region in self.regions}

    def _cut(self, local: torch.Tensor, region: Region, residence: Residence) -> LogicalTensor:
        first = max(self.offsets[0], region.start)
        last = min(self.offsets[0] + self.local_shape[0], region.stop)
        pieces: tuple[Piece, ...] = ()
        if first < last and local.numel():
            view = local.narrow(0, first - self.offsets[0], last - first)
            pieces = (Piece((first - region.start, *self.offsets[1:]), view),)
        return LogicalTensor((region.stop - region.start, *self.shape[1:]), local.dtype, pieces, residence)


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A parameter as the run holds it, and what it is in a checkpoint.

    Attributes:
        master: this rank's shard in float32, on the host, of which `parameter` is a rounded copy; None where
            `parameter` itself is the weight.
    """

    parameter: nn.Parameter
    placement: Placement
    master: torch.Tensor | None = None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself; detached, sharing memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def gather(tensor: LogicalTensor, process: Process) -> torch.Tensor | None:
    """The whole tensor on the host of rank 0, None elsewhere; collective on the control group."""
    mine = [(piece.offsets, piece.tensor.cpu()) for piece in tensor.pieces]
    pieces = process.gather(mine)
    if pieces is None:
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for offsets, block in (piece for of_rank in pieces for piece in of_rank):
        whole[tuple(slice(start, start + size) for start, size in zip(offsets, block.shape, strict=True))] = (
            block
        )
    return whole
