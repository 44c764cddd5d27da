"""Operations of training a causal transformer, and what share of a device's peak they reach (MFU).

Forward and backward of a token take `6 N + 12 L W C` operations: 6 for each of the N parameters that it is
multiplied with (2 forward, 4 backward), and for attention, in each of L layers, 12 for each of W = heads *
head_dim channels and each of the C keys that the token attends to (scores and values, 2 each, times 3 for
forward and backward). This is the formula of PaLM (Chowdhery et al. 2022, appendix B; there C is the whole
sequence) and Kaplan et al. (2020), with causal attention counted as what it needs: C is half the length of a
document. As in Chinchilla (Hoffmann et al. 2022, appendix F) the output head counts, also where it shares its
weights with the embedding; looking an embedding up is free. Work that is done twice (activation
checkpointing) counts once: this is model, not hardware, utilisation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Dense bf16 tensor-core peak in TFLOP/s with fp32 accumulation, without sparsity; source: NVIDIA data sheets,
# and for GeForce and RTX A6000 cards the architecture white papers. V100 and T4 have no bf16: theirs is the
# fp16 peak. All words of an entry stand in the device's name; the entry with the most words wins.
_PEAK_TFLOPS: dict[str, float] = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "RTX A6000": 154.8,
    "RTX 3090": 71.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
    "V100": 125.0,
    "V100 PCIE": 112.0,
    "T4": 65.0,
}
# A slice of a card, and cards of the same name with another chip or clock.
_OTHER_CARDS = frozenset({"mig", "laptop", "max", "d", "super", "ti"})


def flops_per_token(
    *, num_matmul_parameters: int, num_layers: int, attention_width: int, mean_context: float
) -> float:
    """Operations of forward and backward per token.

    Args:
        num_matmul_parameters: parameters that a token is multiplied with: all but the embedding table, and
            the output head also if it is tied; of a mixture of experts only the experts that a token visits.
        num_layers: attention layers.
        attention_width: number of query heads times head_dim.
        mean_context: keys that a token attends to, on average (see `mean_causal_context`).
    """
    return 6.0 * num_matmul_parameters + 12.0 * num_layers * attention_width * mean_context


def mean_causal_context(document_lengths: Iterable[int]) -> float:
    """Keys that a token attends to on average, itself included: (T + 1) / 2 for one document of T tokens.

    Args:
        document_lengths: tokens of each document of a batch; attention never crosses documents.
    """
    num_tokens = num_pairs = 0
    for length in document_lengths:
        num_tokens += length
        num_pairs += length * (length + 1) // 2
    return num_pairs / num_tokens if num_tokens else 0.0


def mfu(*, tokens_per_second: float, flops_per_token: float, num_devices: int, peak_tflops: float) -> float:
    """Model FLOPs utilisation: the share, 0 to 1, of the peak of all devices that the model's operations
    reach.

    Args:
        tokens_per_second: over all ranks.
        peak_tflops: peak of one device, in TFLOP/s.
    """
    return tokens_per_second * flops_per_token / (num_devices * peak_tflops * 1e12)


def known_peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by its CUDA name, in TFLOP/s; None if it is not in the table."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _OTHER_CARDS:
        return None
    matches = [entry for entry in _PEAK_TFLOPS if set(entry.lower().split()) <= words]
    return _PEAK_TFLOPS[max(matches, key=lambda entry: len(entry.split()))] if matches else None
