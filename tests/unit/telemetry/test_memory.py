"""Memory of this process, and the estimate before a run."""

from __future__ import annotations

import mmap

import psutil

from telemetry.memory import estimate_activation_memory, estimate_training_memory, host_memory


def test_the_peak_remembers_what_was_given_back() -> None:
    size = 64 * 2**20
    before = host_memory()
    with mmap.mmap(-1, size) as block:
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
        during = host_memory()
    after = host_memory()
    assert during.resident_bytes - before.resident_bytes > 0.9 * size
    assert after.peak_bytes >= during.resident_bytes - 2**20
    assert after.resident_bytes < during.resident_bytes - 0.9 * size
    assert abs(after.resident_bytes - psutil.Process().memory_info().rss) < 16 * 2**20


def test_the_estimate_of_a_sharded_adamw_run_equals_the_count_by_hand() -> None:
    estimate = estimate_training_memory(
        num_parameters=1001, shards=2, gathered_parameters=100, compute_bytes=2, activation_bytes=7
    )
    # 501 parameters on the larger shard, float32 weight, gradient and two moments each.
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (2004, 2004, 4008)
    assert (estimate.gathered, estimate.activations) == (200, 7)
    assert estimate.total == 2004 + 2004 + 4008 + 200 + 7
    assert list(estimate.summary()) == [
        "weights",
        "gradients",
        "optimizer",
        "gathered",
        "activations",
        "total per process",
    ]


def test_parts_that_a_run_does_not_have_are_left_out_of_the_summary() -> None:
    estimate = estimate_training_memory(num_parameters=1024, shards=1, optimizer_bytes_per_parameter=0)
    assert estimate.summary() == {
        "weights": "4.0 KiB",
        "gradients": "4.0 KiB",
        "total per process": "8.0 KiB",
    }


def test_checkpointing_keeps_one_value_per_block_and_recomputes_one_block() -> None:
    sizes = {"num_tokens": 10, "hidden_size": 4, "num_layers": 30, "vocab_size": 0, "compute_bytes": 2}
    assert estimate_activation_memory(**sizes, checkpointing=False) == 10 * 4 * 2 * 17 * 30
    assert estimate_activation_memory(**sizes, checkpointing=True) == 10 * 4 * 2 * (30 + 17)
    with_logits = estimate_activation_memory(**{**sizes, "vocab_size": 5}, checkpointing=True)
    assert with_logits - estimate_activation_memory(**sizes, checkpointing=True) == 2 * 10 * 5 * 4
