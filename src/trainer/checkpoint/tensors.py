"""DCP's view of the tensors of a checkpoint: which blocks this rank writes and reads, and from and into
which memory.

`LogicalTensor` says where a rank's data lies; DCP asks for it through three methods, and its planners look
objects up by name and offset. Everything DCP keeps in a file is a tensor of its own, so views are handed
over as tensors with a storage of just their size: DCP would copy them otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from contract.errors import CheckpointError
from trainer.hold import Hold
from trainer.parallel.layout import LogicalTensor, Piece

_NUMPY_TYPES = (torch.float32, torch.float64)
_SAME_SIZE_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorEntry:
    """One logical tensor as DCP's planners ask for it (torch.distributed.checkpoint's `_Checkpointable`)."""

    def __init__(self, tensor: LogicalTensor) -> None:
        self._tensor = tensor
        self._pieces = {piece.offsets: piece for piece in tensor.pieces}

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self._tensor.shape)

    def piece(self, index: MetadataIndex) -> Piece:
        """The block that `index` names."""
        return self._pieces[tuple(index.offset or ())]

    def pieces(self, name: str) -> Iterator[tuple[MetadataIndex, torch.Tensor]]:
        """The blocks and their indices, where this tensor is called `name`."""
        for piece in self._tensor.pieces:
            yield MetadataIndex(name, torch.Size(piece.offsets)), piece.tensor

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._tensor.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(piece.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(piece), properties, self.size()),
            )
            for piece in self._tensor.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece) for piece in self._tensor.pieces]


def as_entries(tensors: Mapping[str, LogicalTensor]) -> dict[str, Any]:
    """The state dict for `dcp.save` and `dcp.load` with the planners of this module."""
    return {name: TensorEntry(tensor) for name, tensor in tensors.items()}


class EntrySavePlanner(DefaultSavePlanner):
    """Hands blocks to the writer's threads, and tells the hold when each has been read.

    A thread writes one block after the other: it asks for the next when it is done with the one before, and
    says `end_of_file` after its last.

    Args:
        hold: over the blocks that are read by reference; None if nothing changes before the write has ended.
        finite_prefix: tensors whose name begins so must not hold NaN or infinity. Checked when they are
            read, by the writer's threads: the training step does not wait for it.
        may_be_infinite: names of those among them that may.
    """

    def __init__(self, hold: Hold | None, finite_prefix: str, may_be_infinite: Collection[str] = ()) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=False
        )
        self._hold = hold
        self._finite_prefix = finite_prefix
        self._may_be_infinite = may_be_infinite
        self._held = threading.local()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Let go of blocks that another rank writes (replicas)."""
        plan = super().finish_plan(new_plan)
        if self._hold is not None:
            kept = {item.index for item in plan.items}
            for name, entry in self.state_dict.items():
                for index, piece in entry.pieces(name):
                    if index not in kept and self._hold.covers(piece):
                        self._hold.end_read(piece)
        return plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of one block, for the calling thread to read until its next call.

        Raises:
            CheckpointError: it should be finite and is not.
        """
        self.end_of_file()
        entry: TensorEntry = self.state_dict[index.fqn]
        source = piece = entry.piece(index).tensor
        if self._hold is not None and self._hold.covers(piece):
            source = self._hold.begin_read(piece)
            self._held.piece = piece
        block = own_storage(source)
        must_be_finite = index.fqn.startswith(self._finite_prefix) and index.fqn not in self._may_be_infinite
        if must_be_finite and not _is_finite(block):
            raise CheckpointError(
                f"the weight {index.fqn.removeprefix(self._finite_prefix)} holds NaN or infinity"
            )
        return block

    def can_wait(self, index: MetadataIndex) -> bool:
        """Whether other blocks should be written first, because their owner may be waiting for them."""
        entry: TensorEntry = self.state_dict[index.fqn]
        piece = entry.piece(index).tensor
        return self._hold is not None and self._hold.covers(piece) and self._hold.is_aside(piece)

    def end_of_file(self) -> None:
        """The calling thread has written all that it was handed."""
        piece = getattr(self._held, "piece", None)
        if piece is not None:
            assert self._hold is not None
            self._held.piece = None
            self._hold.end_read(piece)


class EntryLoadPlanner(DefaultLoadPlanner):
    """Fills the blocks of a state dict of `TensorEntry`s in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As the base class, which would refuse values that are no tensors."""
        self.original_state_dict = state_dict
        self.state_dict = state_dict
        self.mappings = {}
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory to fill."""
        entry: TensorEntry = self.state_dict[index.fqn]
        return entry.piece(index).tensor


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage is no larger than itself; device tensors come to the host."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor.cpu().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    flat = tensor.view(-1).view(_SAME_SIZE_INTEGERS[tensor.itemsize])
    return torch.from_numpy(flat.numpy()).view(tensor.dtype).view(tensor.shape)


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    # A sum needs no memory, and is finite only if every element is; where it is not, it may have overflowed.
    # numpy's runs on this thread alone, while torch's would take cores from the training step.
    with np.errstate(over="ignore", invalid="ignore"):
        total = tensor.numpy().sum() if tensor.dtype in _NUMPY_TYPES else tensor.sum().item()
    return bool(np.isfinite(total)) or bool(torch.isfinite(tensor).all())


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape)
