"""Optimizer whose state lives in host memory and comes to the device for the update, chunk by chunk.

Weights and gradients stay on the device. While one chunk is updated, the next one is on its way to the
device and the one before on its way back; no more than these three are there at once. torch's optimizers
make the updates, but their state dictionaries are empty between them: what a checkpoint reads are the host
buffers, which keep their addresses.

On a CPU the same code runs; host and device are different buffers there too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.hold import Hold
from trainer.optimizer.groups import COUNTER, GroupOptions, GroupSpec, build_carriers, named_gradients
from trainer.optimizer.offload.plan import Chunk, Span, plan_chunks
from trainer.optimizer.offload.slots import HostState
from trainer.optimizer.resident import counter_device, gradient_norm, scale_gradients
from trainer.parallel.device import Device, Mark
from trainer.parallel.layout import LogicalTensor, ModelParameter, local_part

# Of all optimizers here AdamW has the most: two float32 moments.
_STATE_BYTES_PER_ELEMENT = 8


@dataclass(slots=True)
class _Transit:
    """A chunk whose state is on the device, or on its way.

    Attributes:
        spans: those whose parameter has a gradient.
        state: of each span on the device: flat copies at first, then what the update left.
        arrived: the copies to the device are done.
        left: the copies back to the host are done.
    """

    chunk: Chunk
    spans: list[Span]
    state: list[dict[str, torch.Tensor]]
    arrived: Mark
    left: Mark = field(default_factory=lambda: Mark(None))

    def counted(self) -> set[str]:
        """Parameters whose updates are counted."""
        return {span.name for span, state in zip(self.spans, self.state, strict=True) if COUNTER in state}

    def free(self) -> None:
        """Free the device's memory, for the chunk that is fetched next."""
        # The memory is the current stream's: what it does from now on may be in the same place.
        self.left.join()
        self.state.clear()


class OffloadedStateOptimizer:
    """Implements `Optimizer`.

    Args:
        parameters: every trained parameter by its name.
        groups: together they hold each parameter once.
        chunk_bytes: most state of one chunk; a parameter that cannot be cut may have more.
        device: of this rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, ModelParameter],
        groups: Sequence[GroupSpec],
        *,
        chunk_bytes: int,
        device: Device,
    ) -> None:
        self._parameters = {name: item for name, item in parameters.items() if item.parameter.requires_grad}
        self._device = device
        self._chunks = _plan(self._parameters, groups, max(1, chunk_bytes // _STATE_BYTES_PER_ELEMENT))
        self._is_elementwise = {group.name: group.is_elementwise for group in groups}
        self._optimizers = build_carriers(
            groups, {name: item.parameter for name, item in self._parameters.items()}
        )
        self._options = GroupOptions(list(self._optimizers.values()))
        self._host = HostState(self._parameters, device)
        self._inward = device.side_stream()
        self._outward = device.side_stream()
        self._hold: Hold | None = None

    def before_backward(self, lr_factor: float | None) -> None:
        """See `Optimizer`: nothing happens before `step`."""

    def grad_norm(self) -> float:
        """See `Optimizer`."""
        return gradient_norm(named_gradients(item.parameter for item in self._parameters.values()))

    def step(self, lr_factor: float, grad_scale: float) -> None:
        """See `Optimizer`.

        Raises:
            CheckpointError: a write did not let go of the state in time; the update is incomplete then.
        """
        scale_gradients(named_gradients(item.parameter for item in self._parameters.values()), grad_scale)
        self._options.set_lr_factor(lr_factor)
        counted: set[str] = set()
        before: _Transit | None = None
        current = self._fetch(self._chunks[0]) if self._chunks else None
        for next_chunk in [*self._chunks[1:], None]:
            if current is None:
                break
            following = None if next_chunk is None else self._fetch(next_chunk)
            self._update(current)
            counted |= current.counted()
            if before is not None:
                before.free()
            self._give_back(current)
            before, current = current, following
        if before is not None:
            before.free()
        self._host.advance(counted)

    def zero_grad(self) -> None:
        """See `Optimizer`."""
        for item in self._parameters.values():
            item.parameter.grad = None

    def hold_state_updates(self, hold: Hold) -> None:
        """See `Optimizer`: each chunk waits before it is copied back; what is before that goes on."""
        self._hold = hold

    def weights(self) -> dict[str, LogicalTensor]:
        """See `Optimizer`: the parameters are the weights."""
        return {}

    def weights_loaded(self) -> None:
        """See `Optimizer`: there are no copies."""

    def close(self) -> None:
        """See `Optimizer`: nothing runs in the background."""
        self._outward.finish()

    def tensors(self) -> dict[str, LogicalTensor]:
        """See `Optimizer`."""
        self._outward.finish()
        return self._host.tensors()

    def values(self) -> dict[str, Any]:
        """See `Optimizer`."""
        return self._options.values()

    def tensors_to_load(self, names: Collection[str]) -> dict[str, LogicalTensor]:
        """See `Optimizer`.

        Raises:
            CheckpointError: the state belongs to a parameter that this model does not have.
        """
        self._outward.finish()
        return self._host.allocate(names)

    def loaded(self, values: Mapping[str, Any]) -> None:
        """See `Optimizer`.

        Raises:
            CheckpointError: the state belongs to another optimizer, or its groups are others.
        """
        self._host.check_loaded()
        self._options.load(values)

    def _fetch(self, chunk: Chunk) -> _Transit:
        """Begin to copy the state of `chunk` to the device."""
        spans = [span for span in chunk.spans if self._parameters[span.name].parameter.grad is not None]
        sources = [self._host.parts(span) for span in spans]
        state = [
            {key: self._device.empty(part.shape, part.dtype) for key, part in parts.items()}
            for parts in sources
        ]
        with self._inward.queue():
            for copies, parts in zip(state, sources, strict=True):
                for key, copy in copies.items():
                    copy.copy_(parts[key], non_blocking=True)
        return _Transit(chunk, spans, state, self._inward.mark())

    def _update(self, transit: _Transit) -> None:
        """Update the weights of a chunk and its state on the device."""
        transit.arrived.join()
        optimizer = self._optimizers[transit.chunk.group]
        (group,) = optimizer.param_groups
        is_cut = self._is_elementwise[transit.chunk.group]
        for span, copies in zip(transit.spans, transit.state, strict=True):
            parameter = self._parameters[span.name].parameter
            # Views are made anew each time: FSDP may have laid the shard elsewhere.
            target = _slice(parameter, span) if is_cut else parameter
            group["params"].append(target)
            count = self._host.count(span.name)
            if count is not None:
                copies[COUNTER] = torch.full((), count, device=counter_device(optimizer, parameter))
            if copies:
                optimizer.state[target] = {
                    key: copy if key == COUNTER or is_cut else _like_shard(copy, parameter)
                    for key, copy in copies.items()
                }
        optimizer.step()
        transit.state = [_tensors_of(optimizer.state.get(target, {})) for target in group["params"]]
        optimizer.state.clear()
        group["params"] = []

    def _give_back(self, transit: _Transit) -> None:
        """Begin to copy the state of a chunk back, as soon as no write reads it any more."""
        copies = [
            (self._host.part(span, key, item.dtype), item)
            for span, state in zip(transit.spans, transit.state, strict=True)
            for key, item in state.items()
            if key != COUNTER
        ]
        if self._hold is not None:
            self._hold.wait(target for target, _ in copies)
            if self._hold.is_over:
                self._hold = None
        with self._outward.queue():
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        transit.left = self._outward.mark()


def _plan(
    parameters: Mapping[str, ModelParameter], groups: Sequence[GroupSpec], chunk_numel: int
) -> list[Chunk]:
    is_elementwise = {name: group.is_elementwise for group in groups for name in group.parameters}
    numels = {
        name: local_part(item.parameter).numel() if is_elementwise[name] else _largest_shard(item.parameter)
        for name, item in parameters.items()
    }
    # What lies on other ranks only: torch is still asked, so that ranks agree on the names of the state.
    empty = [
        Chunk(group.name, tuple(Span(name, 0, 0) for name in group.parameters if not numels[name]))
        for group in groups
    ]
    return [*plan_chunks(numels, groups, chunk_numel), *(chunk for chunk in empty if chunk.spans)]


def _largest_shard(parameter: torch.Tensor) -> int:
    """Elements of the largest local shard: the same number on all ranks.

    An update of whole matrices communicates, so all ranks make the same chunks of them.
    """
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard():
                dim = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
                shape[dim] = -(-shape[dim] // parameter.device_mesh.size(axis))
    return torch.Size(shape).numel()


def _slice(parameter: torch.nn.Parameter, span: Span) -> torch.Tensor:
    """The weights of `span`, sharing memory, with their gradient."""
    assert parameter.grad is not None
    weights = local_part(parameter).view(-1)[span.start : span.stop]
    weights.grad = local_part(parameter.grad).reshape(-1)[span.start : span.stop]
    return weights


def _like_shard(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`flat` as a tensor that is sharded as `parameter` is."""
    local = flat.view(local_part(parameter).shape)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of torch's state, this rank's part, flat."""
    return {
        key: local_part(item).reshape(-1) for key, item in state.items() if isinstance(item, torch.Tensor)
    }
