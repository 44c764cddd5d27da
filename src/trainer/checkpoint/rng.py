"""State of the random generators of each rank: Python, numpy, torch on the host and on the device."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from trainer.parallel.device import Device

PREFIX = "rng.rank_"


def capture(device: Device) -> torch.Tensor:
    """All generators of this rank as one uint8 tensor; its length varies."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    on_device = device.rng_state()
    content = msgspec.msgpack.encode(
        {
            "python": [version, list(words), gauss],
            "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
            "torch": torch.get_rng_state().numpy().tobytes(),
            "device": None if on_device is None else on_device.cpu().numpy().tobytes(),
        }
    )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def restore(state: torch.Tensor, device: Device) -> None:
    """Set all generators of this rank to `state`, as `capture` gave it. A device that is new keeps its own
    state.
    """
    content: dict[str, Any] = msgspec.msgpack.decode(state.numpy().tobytes())
    version, words, gauss = content["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = content["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_byte_tensor(content["torch"]))
    if content["device"] is not None:
        device.set_rng_state(_byte_tensor(content["device"]))


def reseed(state_of_rank_0: torch.Tensor, rank: int, world_size: int) -> None:
    """Seed all generators from the saved state of rank 0: the same for the same checkpoint, rank and world
    size.
    """
    digest = xxhash.xxh3_64(state_of_rank_0.numpy().tobytes())
    digest.update(f"{rank} of {world_size}".encode())
    seed = digest.intdigest() >> 1
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)


def _byte_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
