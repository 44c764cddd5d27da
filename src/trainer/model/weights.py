"""Reading Hugging Face weights into the shards of a model that was built on the meta device.

Each rank reads only its own slice of every tensor, straight from the safetensors files, also where the files
hold every expert of a mixture on its own. Models whose names differ in other ways (transformers converts them
while loading) and random initialisation go through a full copy on the host instead, behind the same
interface.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from contract.errors import ModelError
from trainer.model.causal_lm import CausalLM
from trainer.model.experts import ExpertReader, merge_rules
from trainer.parallel.layout import LogicalTensor, local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Slices = tuple[slice, ...]


class WeightReader(Protocol):
    """Random access to full tensors by Hugging Face name."""

    def names(self) -> set[str]:
        """Names that can be read."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape."""
        ...

    def read(self, name: str, slices: Slices) -> torch.Tensor:
        """A part of a tensor."""
        ...


class SafetensorsReader:
    """Reads slices from the `.safetensors` files of a folder; opens each file once.

    Raises:
        ModelError: the folder holds no weights, its index names files that are missing, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(_files_of(index))
        else:
            files = sorted(path.name for path in folder.glob("*.safetensors"))
        missing = [file for file in files if not (folder / file).is_file()]
        if not files or missing:
            raise ModelError(
                f"{folder} holds no complete safetensors weights (missing: {', '.join(missing) or 'all'})"
            )
        self._handles: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(folder / file, framework="pt", device="cpu")
            except Exception as error:  # safetensors raises its own type for damaged files
                raise ModelError(f"{folder / file} cannot be read: {error}") from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> set[str]:
        """See `WeightReader`."""
        return set(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightReader`."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def read(self, name: str, slices: Slices) -> torch.Tensor:
        """See `WeightReader`."""
        return self._handles[name].get_slice(name)[slices] if slices else self._handles[name].get_tensor(name)


def _files_of(index: Path) -> set[str]:
    """Names of the files that an index lists."""
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index} is damaged ({type(error).__name__}: {error}); fetch the model again"
        ) from error


class TensorReader:
    """Reads from full tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        """See `WeightReader`."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightReader`."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str, slices: Slices) -> torch.Tensor:
        """See `WeightReader`."""
        return self._tensors[name][slices]


def open_weights(
    folder: Path,
    needed: set[str],
    lm: PreTrainedModel,
    load_converted: Callable[[], Mapping[str, torch.Tensor]],
) -> WeightReader:
    """The reader for the weights of `lm`: slices of the files, of single experts where the model holds them
    as one tensor, or `load_converted()` where other names do not match.
    """
    files = SafetensorsReader(folder)
    if needed <= files.names():
        return files
    reader = ExpertReader(files, merge_rules(lm), needed)
    missing = needed - reader.names()
    if not missing:
        return reader
    logger.info(
        "%d of %d weights have other names in the files (e.g. %s): loading a full copy on the host to "
        "convert them",
        len(missing), len(needed), min(missing),
    )  # fmt: skip
    return TensorReader(load_converted())


@torch.no_grad()
def materialize(
    model: CausalLM, reader: WeightReader, device: torch.device, *, keep_masters: bool = False
) -> None:
    """Allocate the shards of a meta-device model on `device` and fill them; recompute buffers.

    Args:
        keep_masters: also leave the parameters' shards in float32 on the host, as `model.masters`.

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    needed = {
        region.name: (region.stop - region.start, *tuple(item.shape)[1:]) if item.ndim else ()
        for name, item in model.run_state().items()
        for region in model.placement(name, item).regions
    }
    absent = sorted(set(needed) - reader.names())
    if absent:
        raise ModelError(f"{len(absent)} weights are missing from the files, e.g. {', '.join(absent[:3])}")
    for name, shape in needed.items():
        if reader.shape(name) != shape:
            raise ModelError(
                f"{name} has shape {reader.shape(name)} in the files, but the model needs {shape}"
            )
    state: dict[str, torch.Tensor] = {}
    for name, item in model.run_state().items():
        shard = _allocate(item, device)
        local, placement = local_part(shard), model.placement(name, item)
        if keep_masters and isinstance(item, nn.Parameter):
            model.masters[name] = torch.empty(local.shape)
            _fill(reader, placement.logical(model.masters[name]))
            local.copy_(model.masters[name])
        else:
            _fill(reader, placement.logical(local))
        state[name] = nn.Parameter(shard, item.requires_grad) if isinstance(item, nn.Parameter) else shard
    _assign(model, state)
    _rebuild_buffers(model, device)


def _allocate(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    local_shape = local_part(like).shape
    local = torch.empty(local_shape, dtype=like.dtype, device=device)
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _fill(reader: WeightReader, targets: Mapping[str, LogicalTensor]) -> None:
    for name, target in targets.items():
        for piece in target.pieces:
            slices = tuple(
                slice(start, start + size)
                for start, size in zip(piece.offsets, piece.tensor.shape, strict=True)
            )
            piece.tensor.copy_(reader.read(name, slices))


def _assign(model: CausalLM, state: Mapping[str, torch.Tensor]) -> None:
    """Put the tensors in place; modules that shared a parameter (tied weights) share the new one."""
    by_old = {id(old): state[name] for name, old in model.run_state().items()}
    full = {name: by_old[id(old)] for name, old in model.state_dict(keep_vars=True).items()}
    model.load_state_dict(full, strict=False, assign=True)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"parameters left without storage: {left}"


def _rebuild_buffers(model: CausalLM, device: torch.device) -> None:
    """Give the buffers that no file holds storage and their initial value, by the model's own initialiser.

    These are rotary tables, above all. Persistent buffers have their values from the files by now.
    """
    for parameter in model.parameters():
        # transformers' initialisers leave flagged parameters alone.
        parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    for module in model.lm.modules():
        owned = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in owned:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if owned:
            model.lm._init_weights(module)
