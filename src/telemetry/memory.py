"""Memory: what the process holds, and what training will need."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Physical memory of this process, in bytes."""

    resident_bytes: int
    peak_bytes: int


def host_memory() -> HostMemory:
    """Physical memory that this process holds, and the most that it held."""
    resident_bytes = psutil.Process().memory_info().rss
    return HostMemory(resident_bytes, max(resident_bytes, _peak_bytes()))


def _peak_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would also count what the parent held before this program was started.
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What one rank will need for training, in bytes. Lower bounds: buffers of libraries are not in it."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def summary(self) -> dict[str, str]:
        """Title and value of each part, for the start-up summary; parts that are zero are left out."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: format_bytes(size) for name, size in parts.items() if size} | {
            "total per process": format_bytes(self.total)
        }


def estimate_training_memory(
    *,
    num_parameters: int,
    shards: int,
    param_bytes: int = 4,
    gradient_bytes: int = 4,
    optimizer_bytes_per_parameter: float = 8,
    gathered_parameters: int = 0,
    compute_bytes: int = 4,
    activation_bytes: int = 0,
) -> MemoryEstimate:
    """Memory of one rank of a sharded (FSDP) run.

    Args:
        num_parameters: parameters of the model; tied ones count once.
        shards: ranks that share one copy of the weights, gradients and optimizer state.
        param_bytes: bytes per stored weight.
        gradient_bytes: bytes per stored gradient.
        optimizer_bytes_per_parameter: 8 for AdamW in float32 (two moments), 4 for momentum, 0 for signSGD.
        gathered_parameters: most parameters that are gathered at once (the largest block twice, as the next
            one is prefetched, and the root); 0 where nothing is gathered.
        compute_bytes: bytes per weight in forward and backward.
        activation_bytes: from `estimate_activation_memory`.
    """
    shard = -(-num_parameters // shards)
    return MemoryEstimate(
        weights=shard * param_bytes,
        gradients=shard * gradient_bytes,
        optimizer=int(shard * optimizer_bytes_per_parameter),
        gathered=gathered_parameters * compute_bytes,
        activations=activation_bytes,
    )


def estimate_activation_memory(
    *,
    num_tokens: int,
    hidden_size: int,
    num_layers: int,
    vocab_size: int,
    compute_bytes: int,
    checkpointing: bool,
) -> int:
    """Bytes that forward keeps for the backward of one micro-batch; an estimate for a usual block.

    A block keeps about 17 values per token and hidden channel (Korthikanti et al. 2022, equation 1, without
    dropout and with attention scores computed again in backward), with block-wise checkpointing one. The
    logits and their gradient are float32.

    Args:
        num_tokens: tokens of a micro-batch on one rank.
        vocab_size: columns of the logits that are held at once; 0 if the loss never holds them.
    """
    per_layer = 1 if checkpointing else 17
    recomputed = 17 if checkpointing else 0
    blocks = num_tokens * hidden_size * compute_bytes * (per_layer * num_layers + recomputed)
    logits = 2 * num_tokens * vocab_size * 4
    return blocks + logits


def format_bytes(size: float) -> str:
    """`size` bytes for a reader, in binary units: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB" if size < 1024 else f"{size / 1024:.1f} TiB"
