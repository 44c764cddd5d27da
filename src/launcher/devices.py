"""Which devices a machine has and how many processes it should run, known without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")
_IDENTITIES = ("GPU-", "MIG-")


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """NVIDIA GPUs that CUDA programs of this user would see, as `CUDA_VISIBLE_DEVICES` names them.

    Args:
        environment: `CUDA_VISIBLE_DEVICES` in it hides devices, as CUDA reads it: a list of numbers, UUIDs or
            MIG names that ends at the first that is none, or a number without a device.
        devices: folder of device files.
    """
    try:
        present = sum(1 for entry in devices.iterdir() if _GPU.fullmatch(entry.name))
    except OSError:
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if present == 0 or visible is None:
        return [str(index) for index in range(present)]
    names = []
    for name in (part.strip() for part in visible.split(",")):
        is_number = name.isdecimal() and int(name) < present
        if not (is_number or name.startswith(_IDENTITIES)):
            break
        names.append(name)
    return names


def count_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Number of `visible_gpus`."""
    return len(visible_gpus(environment, devices))


def default_processes(device: str, gpus: int) -> int:
    """Processes of a run that names no number: one per GPU, or one on a CPU."""
    return 1 if device == "cpu" else max(gpus, 1)
