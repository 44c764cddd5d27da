"""The update of some spans of parameters on the host: views in, torch's own optimizers at work, views out.

Knows no device, no thread and no order of chunks. State begins with the first gradient of a parameter, as
torch has it: a parameter that never had one has none, and one that has none in an update is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer.optimizer.groups import COUNTER, GroupOptions, GroupSpec, build_carriers
from trainer.optimizer.offload.plan import Span
from trainer.optimizer.offload.slabs import Slabs
from trainer.optimizer.offload.slots import HostState


class HostUpdate:
    """torch's optimizers over slabs.

    Args:
        groups: elementwise ones, as a parameter may be cut.
        slabs: weights and gradients.
        state: of the optimizers.
    """

    def __init__(self, groups: Sequence[GroupSpec], slabs: Slabs, state: HostState) -> None:
        assert all(group.is_elementwise for group in groups)
        self._slabs = slabs
        self._state = state
        self._optimizers = build_carriers(
            groups, {name: item.parameter for name, item in slabs.masters.items()}
        )
        self.options = GroupOptions(list(self._optimizers.values()))
        self._counted: set[str] = set()

    def sum_of_squares(self, spans: Sequence[Span], shares: Mapping[str, float]) -> float:
        """Of the gradients, each parameter's times its share; in float64."""
        return sum(
            shares[span.name]
            * float(torch.linalg.vector_norm(self._slabs.gradients(span), dtype=torch.float64)) ** 2
            for span in spans
        )

    def memory(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """What `run` changes in place."""
        state = [part for span in spans for part in self._state.parts(span).values()]
        return [*(self._slabs.weights(span) for span in spans), *state]

    def run(self, group: str, spans: Sequence[Span], grad_scale: float) -> None:
        """Update the weights and the state of `spans`, which all have a gradient; scales the gradients in
        place.
        """
        optimizer = self._optimizers[group]
        tensors = [self._slabs.weights(span) for span in spans]
        gradients = [self._slabs.gradients(span) for span in spans]
        if grad_scale != 1.0:
            torch._foreach_mul_(gradients, grad_scale)
        for span, weights, gradient in zip(spans, tensors, gradients, strict=True):
            weights.grad = gradient
            before = self._state.parts(span)
            count = self._state.count(span.name)
            if count is not None:
                before[COUNTER] = torch.full((), count)
            if before:
                optimizer.state[weights] = before
        optimizer.param_groups[0]["params"] = tensors
        try:
            optimizer.step()
            for span, weights in zip(spans, tensors, strict=True):
                self._keep(span, optimizer.state.get(weights, {}))
        finally:
            optimizer.param_groups[0]["params"] = []
            optimizer.state.clear()

    def finish(self) -> None:
        """The update of all spans is complete: count it. A parameter that was cut is counted once."""
        self._state.advance(self._counted)
        self._counted.clear()

    def _keep(self, span: Span, state: Mapping[str, object]) -> None:
        """Take state that torch has just begun over into the host's memory."""
        if COUNTER in state:
            self._counted.add(span.name)
        for key, item in state.items():
            if key == COUNTER or not isinstance(item, torch.Tensor):
                continue
            kept = self._state.part(span, key, item.dtype)
            if kept.data_ptr() != item.data_ptr():
                kept.copy_(item)
