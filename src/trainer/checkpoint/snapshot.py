"""The state of training at one moment, ready to be written while training goes on, or while it waits.

Of what the next step changes on the device, a copy is made in host buffers that are kept from save to save.
State that lives on the host already is taken by reference, behind a `Hold`. It comes first, so that its
owner is let go as early as possible; private copies, which nobody waits for, come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    ) -> Snapshot:
        """A snapshot that training may go on from at once. The one before must have been written.

        Args:
            timeout_seconds: longest wait of an optimizer for its state.
        """
        tensors = part_tensors(parts)
        held = {name: item for name, item in tensors.items() if item.residence == "host"}
        others = {name: self._copy(name, item) for name, item in tensors.items() if name not in held}
        # The copies are queued on the device; nothing may read them before they have arrived.
        self._device.synchronize()
        self._aside.clear()
        hold = Hold(
            [piece.tensor for item in held.values() for piece in item.pieces],
            buffer=self._aside,
            timeout_seconds=timeout_seconds,
        )
        return Snapshot(step, {**held, **others, **_fresh(rng)}, _values(parts), config, hold)

    def _copy(self, name: str, item: LogicalTensor) -> LogicalTensor:
        if item.residence == "fresh":
            return item
        pieces = []
        for index, piece in enumerate(item.pieces):
            buffer = self._buffers.get((name, index))
            if buffer is None or buffer.shape != piece.tensor.shape or buffer.dtype != piece.tensor.dtype:
                buffer = self._device.empty_on_host(piece.tensor.shape, piece.tensor.dtype)
                self._buffers[name, index] = buffer
            buffer.copy_(piece.tensor, non_blocking=True)
            pieces.append(Piece(piece.offsets, buffer))
        return LogicalTensor(item.shape, item.dtype, tuple(pieces), "fresh")


def refer(
    step: int, parts: Mapping[str, Part], rng: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Snapshot:
    """A snapshot by reference: the caller does not train on until it is written."""
    return Snapshot(step, {**part_tensors(parts), **_fresh(rng)}, _values(parts), config)


def _fresh(rng: Mapping[str, torch.Tensor]) -> dict[str, LogicalTensor]:
    return {name: LogicalTensor.replicated(state, "fresh") for name, state in rng.items()}


def _values(parts: Mapping[str, Part]) -> dict[str, Mapping[str, Any]]:
    return {name: part.values() for name, part in parts.items()}
