"""The state of all parameters in host memory.

A buffer is allocated when its state first exists and stays where it is: updates and loads fill it in place,
so a checkpoint may be written from it. Counts of updates are scalars beside the buffers, which only the host
changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from trainer.optimizer.groups import COUNTER, CounterTargets, saved_keys, state_tensors
from trainer.optimizer.offload.plan import Span
from trainer.parallel.device import Device
from trainer.parallel.layout import LogicalTensor, ModelParameter, local_part


class HostState:
    """State by parameter and key, in the shape of the parameter's local shard.

    Args:
        parameters: every trained parameter by its name.
        device: of this rank; copies go to it and come from it.
    """

    def __init__(self, parameters: Mapping[str, ModelParameter], device: Device) -> None:
        self._parameters = parameters
        self._device = device
        self._buffers: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
        self._new: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
        self._counts: dict[str, torch.Tensor] = {}
        self._counter_targets = CounterTargets(parameters, {})

    def parts(self, span: Span) -> dict[str, torch.Tensor]:
        """Flat views of the state that `span` had before this update, by key; without the count."""
        return {
            key: buffer.view(-1)[span.start : span.stop] for key, buffer in self._buffers[span.name].items()
        }

    def part(self, span: Span, key: str, dtype: torch.dtype) -> torch.Tensor:
        """The flat view of one state of `span` to write to, allocated if there was none."""
        buffers, new = self._buffers[span.name], self._new[span.name]
        if key not in buffers and key not in new:
            shape = local_part(self._parameters[span.name].parameter).shape
            new[key] = self._device.empty_on_host(shape, dtype)
        buffer = buffers[key] if key in buffers else new[key]
        return buffer.view(-1)[span.start : span.stop]

    def count(self, name: str) -> float | None:
        """Updates of the parameter `name`; None before the first."""
        count = self._counts.get(name)
        return None if count is None else float(count)

    def advance(self, names: Collection[str]) -> None:
        """End an update: count it for each of `names`, and let what was allocated in it be state.

        Not before: the parts of a parameter that was cut are updated one after the other, and the later ones
        have to find the count that the first one found, and no state where the first one found none.
        """
        for name in names:
            self._counts.setdefault(name, torch.zeros(())).add_(1.0)
        self._take_over_new()

    def tensors(self) -> dict[str, LogicalTensor]:
        """All state, buffers by reference; counts are copies, so that nobody has to hold them."""
        counts = {name: {COUNTER: count.clone()} for name, count in self._counts.items()}
        return {
            **state_tensors(self._parameters, self._buffers, "host"),
            **state_tensors(self._parameters, counts, "fresh"),
        }

    def allocate(self, names: Collection[str]) -> dict[str, LogicalTensor]:
        """Memory for exactly the state `names`, to be filled by the caller; other state is forgotten.

        Raises:
            CheckpointError: the state belongs to a parameter that this model does not have.
        """
        keys = saved_keys(self._parameters, names)
        for name, buffers in self._buffers.items():
            wanted = [key for key in keys.get(name, []) if key != COUNTER]
            for key in set(buffers) - set(wanted):
                del buffers[key]
            for key in wanted:
                self.part(Span(name, 0, 0), key, self._parameters[name].parameter.dtype)
        self._take_over_new()
        self._counts = {name: torch.zeros(()) for name, wanted in keys.items() if COUNTER in wanted}
        self._counter_targets = CounterTargets(self._parameters, self._counts)
        return {
            **state_tensors(self._parameters, self._buffers, "host"),
            **self._counter_targets.tensors(),
        }

    def check_loaded(self) -> None:
        """After what `allocate` gave was filled.

        Raises:
            CheckpointError: the parts of a packed parameter do not fit together.
        """
        self._counter_targets.check()

    def _take_over_new(self) -> None:
        for name, buffers in self._new.items():
            self._buffers[name].update(buffers)
            buffers.clear()
