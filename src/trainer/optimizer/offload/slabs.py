"""Weights and gradients of this rank in host memory, and the staging memory beside them.

Everything is allocated once, float32, and keeps its address: what is in a slab may be written to a checkpoint
by reference. Gradients arrive from the device, so their slab is memory that it copies to on its own; weights
reach the device through staging memory in the type that it computes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trainer.optimizer.offload.plan import Span
from trainer.parallel.device import Device, Mark
from trainer.parallel.layout import ModelParameter, local_part

_ALIGNMENT = 16  # elements: a cache line, and what vector instructions want


class Slabs:
    """The local shards of all parameters in one slab of weights and one of gradients.

    Args:
        parameters: every trained parameter by its name; their weights are taken over.
        device: of this rank.
    """

    def __init__(self, parameters: Mapping[str, ModelParameter], device: Device) -> None:
        self._offsets: dict[str, int] = {}
        size = 0
        for name, item in parameters.items():
            self._offsets[name] = size
            size += -(-local_part(item.parameter).numel() // _ALIGNMENT) * _ALIGNMENT
        self._weights = torch.empty(size)
        self._gradients = device.empty_on_host((size,), torch.float32)
        self.masters = {name: self._take_over(name, item) for name, item in parameters.items()}
        """The weights as parameters without gradient, in the shape of the local shard: by name."""

    def weights(self, span: Span) -> torch.Tensor:
        """Flat view of the weights of `span`."""
        return self._cut(self._weights, span)

    def gradients(self, span: Span) -> torch.Tensor:
        """Flat view of the gradients of `span`."""
        return self._cut(self._gradients, span)

    def _cut(self, slab: torch.Tensor, span: Span) -> torch.Tensor:
        offset = self._offsets[span.name]
        return slab[offset + span.start : offset + span.stop]

    def _take_over(self, name: str, item: ModelParameter) -> ModelParameter:
        device_copy = local_part(item.parameter)
        view = self.weights(Span(name, 0, device_copy.numel())).view(device_copy.shape)
        view.copy_(device_copy if item.master is None else item.master)
        return ModelParameter(nn.Parameter(view, requires_grad=False), item.placement)


@dataclass(slots=True)
class Slot:
    """Staging memory for one chunk.

    Attributes:
        number: of the worker's task that reads it last.
        left: it was copied to the device.
    """

    memory: torch.Tensor
    number: int
    left: Mark


class Slots:
    """Two slots in turn: one is filled while the other is read.

    Args:
        numel: elements of the largest chunk.
    """

    def __init__(self, device: Device, numel: int, dtype: torch.dtype) -> None:
        self._device = device
        self._numel = numel
        self._dtype = dtype
        self._slots: list[Slot] = []
        self._next = 0

    def take(self) -> Slot:
        """The slot that was taken longest ago; the caller waits until it is read."""
        if not self._slots:  # some are never needed: without accumulation nothing is added on the host
            for _ in range(2):
                memory = self._device.empty_on_host((self._numel,), self._dtype)
                self._slots.append(Slot(memory, 0, Mark(None)))
        self._next = 1 - self._next
        return self._slots[self._next]
