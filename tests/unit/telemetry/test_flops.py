"""Operations against a count by hand and torch's own counter, and the table of peaks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from telemetry.flops import flops_per_token, known_peak_tflops, mean_causal_context, mfu


def test_operations_equal_those_that_torch_counts_for_a_block_and_a_head() -> None:
    tokens, heads, head_dim, vocab = 16, 4, 8, 50
    width = heads * head_dim
    projection = torch.nn.Linear(width, 3 * width, bias=False)
    head = torch.nn.Linear(width, vocab, bias=False)
    hidden = torch.randn(tokens, width, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        query, key, value = projection(hidden).view(tokens, 3, heads, head_dim).permute(1, 2, 0, 3)
        scores = (query @ key.transpose(-1, -2)).softmax(-1)
        head((scores @ value).transpose(0, 1).reshape(tokens, width)).sum().backward()
    # This attention is not causal: every token attends to all of them.
    expected = flops_per_token(
        num_matmul_parameters=projection.weight.numel() + head.weight.numel(),
        num_layers=1,
        attention_width=width,
        mean_context=tokens,
    )
    assert counter.get_total_flops() == tokens * expected


def test_a_document_of_t_tokens_attends_to_half_of_itself_on_average() -> None:
    pairs = sum(position + 1 for length in (5, 3) for position in range(length))
    assert mean_causal_context([5, 3]) == pairs / 8
    assert mean_causal_context([1023]) == 512
    assert mean_causal_context([]) == 0


def test_mfu_is_the_share_of_the_peak_of_all_devices() -> None:
    assert mfu(tokens_per_second=1000, flops_per_token=1e9, num_devices=2, peak_tflops=1.0) == 0.5


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_known_peaks_by_the_name_that_cuda_gives(name: str, peak: float | None) -> None:
    assert known_peak_tflops(name) == peak
