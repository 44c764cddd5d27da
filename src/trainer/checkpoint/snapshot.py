"""The state of training at one moment, ready to be written while training goes on, or while it waits.

Of what the next step changes on the device, a copy is made in host buffers that are kept from save to save.
State that lives on the host already is taken by reference, behind a `Hold`. It comes first, so that its
owner is let go as early as possible; private copies, which nobody waits for, come last.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch

from trainer.checkpoint.base import Part, Snapshot, part_tensors
from trainer.hold import AsideBuffer, Hold
from trainer.parallel.device import Device
from trainer.parallel.layout import LogicalTensor, Piece


class SnapshotBuffers:
    """Host memory for the snapshots of one run: at most one snapshot uses it at a time.

    Args:
        device: whose tensors are copied.
        aside_bytes: most memory for copies of host state that the optimizer wants to change before it is
            written.
    """

    def __init__(self, device: Device, aside_bytes: int) -> None:
        self._device = device
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._aside = AsideBuffer(aside_bytes)

    def take(
        self,
        step: int,
        parts: Mapping[str, Part],
        rng: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        *,
        timeout_seconds: float,
        on_timeout: Literal["raise", "give_up"],
    ) -> Snapshot:
        """A snapshot that training may go on from at once. The write of the one before must have ended.

        Args:
            timeout_seconds: longest wait of an optimizer for its state; then see `Hold`.
        """
        tensors = part_tensors(parts)
        held = {name: item for name, item in tensors.items() if item.residence == "host"}
        before, self._buffers = self._buffers, {}  # what no tensor takes over is freed
        others = {name: self._copy(name, item, before) for name, item in tensors.items() if name not in held}
        # The copies are queued on the device; nothing may read them before they have arrived.
        self._device.synchronize()
        self._aside.clear()
        hold = Hold(
            [piece.tensor for item in held.values() for piece in item.pieces],
            buffer=self._aside,
            timeout_seconds=timeout_seconds,
            on_timeout=on_timeout,
        )
        tensors = {**_by_parameter(held), **others, **_fresh(rng)}
        return Snapshot(step, tensors, _values(parts), config, hold)

    def _copy(
        self, name: str, item: LogicalTensor, buffers: Mapping[tuple[str, int], torch.Tensor]
    ) -> LogicalTensor:
        if item.residence == "fresh":
            return item
        pieces = []
        for index, piece in enumerate(item.pieces):
            buffer = buffers.get((name, index))
            if buffer is None or buffer.shape != piece.tensor.shape or buffer.dtype != piece.tensor.dtype:
                buffer = self._device.empty_on_host(piece.tensor.shape, piece.tensor.dtype)
            self._buffers[name, index] = buffer
            buffer.copy_(piece.tensor, non_blocking=True)
            pieces.append(Piece(piece.offsets, buffer))
        return LogicalTensor(item.shape, item.dtype, tuple(pieces), "fresh")


def _by_parameter(held: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """Weight and state of one parameter beside each other, as an update changes them together."""
    of_parameter: dict[str, dict[str, LogicalTensor]] = {}
    for name, item in held.items():
        part, _, rest = name.partition(".")
        parameter = rest if part == "model" else rest.rpartition(".")[0]
        of_parameter.setdefault(parameter, {})[name] = item
    return {name: item for items in of_parameter.values() for name, item in items.items()}


def refer(
    step: int, parts: Mapping[str, Part], rng: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Snapshot:
    """A snapshot by reference: the caller does not train on until it is written."""
    return Snapshot(step, {**part_tensors(parts), **_fresh(rng)}, _values(parts), config)


def _fresh(rng: Mapping[str, torch.Tensor]) -> dict[str, LogicalTensor]:
    return {name: LogicalTensor.replicated(state, "fresh") for name, state in rng.items()}


def _values(parts: Mapping[str, Part]) -> dict[str, Mapping[str, Any]]:
    # A part may give what it goes on to change.
    return {name: copy.deepcopy(part.values()) for name, part in parts.items()}
