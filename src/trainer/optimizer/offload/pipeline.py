"""From gradients on the device to weights on the device: what happens in one update, and when.

Of a chunk of parameters:

    open -> complete -> updated
      ^                    |
      +------- reset ------+

*open*: gradients arrive, the first of each parameter straight into its slab, later ones through a slot to
be added. *complete*: its sum of squares is taken. *updated*: its weights and state were changed and its
weights are on their way to the device.

A chunk is complete as soon as the last backward has brought a gradient for each of its parameters, or else
when `finish_gradients` says that no more come. Where the update may be early, it follows at once, while
backward goes on with other chunks; otherwise `update` makes it. Nothing else decides: what is received and
what is complete is known to the training thread alone (autograd runs the hooks in place of it), and the
worker only does in order what it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from contract.errors import ModelError
from trainer.hold import Hold
from trainer.optimizer.offload.plan import Chunk, Span
from trainer.optimizer.offload.slabs import Slabs, Slots
from trainer.optimizer.offload.update import HostUpdate
from trainer.optimizer.offload.worker import Worker
from trainer.parallel.device import Device, Mark
from trainer.parallel.layout import ModelParameter, local_part


@dataclass(slots=True)
class _ChunkState:
    """A chunk in the present update.

    Attributes:
        missing: names of the parameters for which the last backward has brought no gradient so far.
        arrivals: of first gradients that may still be on their way.
        squares: the sum of squares, once the worker has taken it.
    """

    missing: set[str]
    arrivals: list[Mark] = field(default_factory=list)
    is_complete: bool = False
    squares: float = 0.0


class Pipeline:
    """Chunks of one rank, and the worker that serves them.

    Args:
        chunks: hold every element of every trained parameter once; parameters without elements as well.
        parameters: on the device, by name.
        shares: of each parameter in the global sum of squares, where several ranks hold the same shard.
        is_early: whether the update of a chunk may be made while backward still runs.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        parameters: Mapping[str, ModelParameter],
        shares: Mapping[str, float],
        slabs: Slabs,
        update: HostUpdate,
        worker: Worker,
        device: Device,
        *,
        is_early: bool,
    ) -> None:
        self._chunks = chunks
        self._parameters = parameters
        self._shares = shares
        self._slabs = slabs
        self._update = update
        self._worker = worker
        self._device = device
        self._is_early = is_early
        self._places: dict[str, list[tuple[int, Span]]] = {name: [] for name in parameters}
        for index, chunk in enumerate(chunks):
            for span in chunk.spans:
                self._places[span.name].append((index, span))
        largest = max((chunk.numel for chunk in chunks), default=0)
        compute_dtype = next((item.parameter.dtype for item in parameters.values()), torch.float32)
        self._arriving = Slots(device, largest, torch.float32)
        self._leaving = Slots(device, largest, compute_dtype)
        self._to_host = device.side_stream()
        self._to_device = device.side_stream()
        self.hold: Hold | None = None
        """The write that may still read what an update changes; None if there is none."""
        self._states: list[_ChunkState] = []
        self._received: set[str] = set()
        self._is_last = False
        self._open()

    @property
    def is_updating(self) -> bool:
        """Whether chunks are updated as they become complete."""
        return self._is_early and self._is_last

    def begin_backward(self, *, is_last: bool) -> None:
        """A backward begins; `is_last` before the last one of an update that will be made."""
        self._is_last = is_last

    def receive(self, name: str, gradient: torch.Tensor) -> None:
        """Take a gradient (this rank's shard, on the device) of the backward that runs; its memory may be
        dropped at once.

        Raises:
            ModelError: the parameter was updated already: its gradient comes in several parts.
        """
        flat = gradient.reshape(-1)
        for index, span in self._places[name]:
            state = self._states[index]
            if state.is_complete:
                self._reopen(name, state)
            source = flat[span.start : span.stop]
            if name in self._received:
                self._add(index, span, source)
            else:
                state.arrivals.append(self._copy_to_host(self._slabs.gradients(span), source))
        self._received.add(name)
        if self._is_last:
            for index in {index for index, _ in self._places[name]}:
                state = self._states[index]
                state.missing.discard(name)
                if not state.missing and not state.is_complete:
                    self._complete(index)

    def finish_gradients(self) -> None:
        """No more gradients come: return when all chunks that have some are complete."""
        for index, state in enumerate(self._states):
            if not state.is_complete and self._present(index):
                self._complete(index)
        self._worker.wait_idle()

    def sum_of_squares(self) -> float:
        """This rank's share of the squared norm of the whole gradient, after `finish_gradients`."""
        return sum(state.squares for state in self._states)

    def update(self, grad_scale: float) -> None:
        """Return when all chunks with a gradient are updated, after `finish_gradients`."""
        if self.is_updating:
            assert grad_scale == 1.0, "the update was made before its scale was known"
        else:
            for index in range(len(self._chunks)):
                spans = self._present(index)
                if spans:
                    run = functools.partial(self._run_update, index, spans, grad_scale)
                    self._worker.submit(f"the update of chunk {index}", run)
        self._worker.wait_idle()
        self._update.finish()
        self._to_device.mark().join()

    def reset(self) -> None:
        """Drop all gradients."""
        # The worker may still read or add some of them.
        self._worker.wait_idle()
        self._open()

    def refresh(self) -> None:
        """Bring the weights on the device up to date, all of them."""
        # What was given to the device so far may still read them.
        self._device.synchronize()
        for chunk in self._chunks:
            self._worker.submit("copies of all weights", functools.partial(self._send, chunk.spans))
        self._worker.wait_idle()
        self._to_device.mark().join()

    def _open(self) -> None:
        self._states = [_ChunkState({span.name for span in chunk.spans}) for chunk in self._chunks]
        self._received = set()
        self._is_last = False

    def _reopen(self, name: str, state: _ChunkState) -> None:
        if self.is_updating:
            raise ModelError(
                f"{name} gets its gradient in several parts within one backward, after the first of which "
                f"model.offload = 'full' has updated it already; set model.offload = 'optimizer', or "
                f"optimizer.on_non_finite = 'skip', with which the update waits for the end of backward"
            )
        state.is_complete = False

    def _present(self, index: int) -> list[Span]:
        return [span for span in self._chunks[index].spans if span.name in self._received]

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        with self._to_host.queue():
            # Converted on the device: a copy that converts on the host would wait for the device.
            target.copy_(source.to(target.dtype), non_blocking=True)
        self._to_host.keep(source)
        return self._to_host.mark()

    def _add(self, index: int, span: Span, source: torch.Tensor) -> None:
        slot = self._arriving.take()
        self._worker.wait_for(slot.number)
        arrived = slot.memory[: span.numel]
        mark, target = self._copy_to_host(arrived, source), self._slabs.gradients(span)

        def add() -> None:
            # Copies arrive in order: the first gradient of the span is there when this one is.
            mark.finish()
            target.add_(arrived)

        slot.number = self._worker.submit(f"the gradient of chunk {index}", add)

    def _complete(self, index: int) -> None:
        state, spans, is_updating = self._states[index], self._present(index), self.is_updating
        state.is_complete = True
        arrivals, state.arrivals = state.arrivals, []

        def run() -> None:
            for mark in arrivals:
                mark.finish()
            state.squares = self._update.sum_of_squares(spans, self._shares)
            if is_updating:
                self._run_update(index, spans, 1.0)

        self._worker.submit(f"chunk {index}", run)

    def _run_update(self, index: int, spans: Sequence[Span], grad_scale: float) -> None:
        """On the worker: wait for the write that reads the chunk, update it, send its weights."""
        hold = self.hold
        if hold is not None:
            with self._worker.limit_of_its_own():
                hold.wait(self._update.memory(spans))
        self._update.run(self._chunks[index].group, spans, grad_scale)
        self._send(spans)

    def _send(self, spans: Sequence[Span]) -> None:
        """On the worker: copy the weights of some spans of one chunk to the device."""
        slot = self._leaving.take()
        slot.left.finish()
        position = 0
        # Nothing that the device was given may still read the weights: their gradient has been computed.
        with self._to_device.queue(after_current=False):
            for span in spans:
                rounded = slot.memory[position : position + span.numel]
                rounded.copy_(self._slabs.weights(span))
                target = local_part(self._parameters[span.name].parameter).view(-1)
                target[span.start : span.stop].copy_(rounded, non_blocking=True)
                position += span.numel
        slot.left = self._to_device.mark()
