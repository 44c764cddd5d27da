"""New weights, however the trainer sends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from contract.policy import BroadcastUpdate, FolderUpdate, WeightUpdate
from inference.receive.broadcast import BroadcastReceiver
from inference.receive.folder import read_folder


class WeightReceiver:
    """Opens weight updates of a server, one at a time, in any thread; keeps the connection to the trainer.

    Args:
        device: on which the server computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._broadcasts = BroadcastReceiver(device)

    @contextmanager
    def open_update(self, update: WeightUpdate) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The tensors of `update` under the names of the model's parameters, each once; blocks while they
        come. On the host, or on `device` where the trainer sends from GPU to GPU.

        A reader that does not take all of them has refused the update.

        Raises:
            PublishError: they cannot be read; from here, or from the iterator.
        """
        match update:
            case FolderUpdate():
                yield read_folder(Path(update.folder))
            case BroadcastUpdate():
                with self._broadcasts.open(update) as tensors:
                    yield tensors

    def close(self) -> None:
        """Release the connection."""
        self._broadcasts.close()


@contextmanager
def open_update(
    update: WeightUpdate, device: torch.device | None = None
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """`WeightReceiver.open_update` for a single update: no connection is kept; None is the CPU."""
    receiver = WeightReceiver(device or torch.device("cpu"))
    try:
        with receiver.open_update(update) as tensors:
            yield tensors
    finally:
        receiver.close()
