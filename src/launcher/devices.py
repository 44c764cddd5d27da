"""How many processes a machine should run, known without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")


def count_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that CUDA programs of this user would see.

    Args:
        environment: `CUDA_VISIBLE_DEVICES` in it hides devices, as CUDA reads it: a list of numbers, UUIDs or
            MIG names that ends at the first number without a device.
        devices: folder of device files.
    """
    try:
        present = sum(1 for entry in devices.iterdir() if _GPU.fullmatch(entry.name))
    except OSError:
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if present == 0 or visible is None:
        return present
    count = 0
    for name in (part.strip() for part in visible.split(",")):
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < present):
            break
        count += 1
    return count


def default_processes(device: str, gpus: int) -> int:
    """Processes of a run that names no number: one per GPU, or one on a CPU."""
    return 1 if device == "cpu" else max(gpus, 1)
