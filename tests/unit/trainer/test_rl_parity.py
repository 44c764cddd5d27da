"""The gradient of the RL objective compared with full logits of unpacked samples, however rows are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.batch import Sample, build_micro_batch
from contract.packing import pack_balanced
from contract.rollout import COMPONENTS
from tests.support.engine import (
    Array,
    build_engine,
    build_sharded,
    difference,
    gradients_of,
    rank_process,
)
from tests.support.ranks import run_ranks
from trainer.config.rl import ClippedLossConfig, LossConfig, TrustRegionLossConfig
from trainer.objective.policy_gradient import PolicyGradient
from trainer.objective.policy_loss import build_token_loss

LOSSES: dict[str, LossConfig] = {
    "trust region": TrustRegionLossConfig(ratio_min=0.7, ratio_max=1.4, log_ratio_penalty=0.05),
    "clipped": ClippedLossConfig(clip_low=0.2, clip_high=0.28),
}
LENGTHS = [3, 31, 9, 24, 5, 17, 2, 12]
TEMPERATURES = [1.0, 0.7, 1.3, 1.0, 0.5, 2.0, 1.0, 1.0]


def samples_of(folder: Path) -> list[Sample]:
    """Samples whose sampler is near the policy, some tokens of it beyond every bound."""
    random = np.random.default_rng(3)
    model = load_reference(folder)
    samples = []
    for index, (length, temperature) in enumerate(zip(LENGTHS, TEMPERATURES, strict=True)):
        tokens = random.integers(3, 259, length)
        with torch.no_grad():
            logprobs = plain_logprobs(model, tokens, temperature).numpy()
        near = np.concatenate([[0.0], logprobs + random.normal(0, 0.3, length - 1)]).astype(np.float32)
        reference = np.concatenate([[0.0], logprobs + random.normal(0, 0.2, length - 1)]).astype(np.float32)
        weights = {name: (random.random(length) < share).astype(np.float32) for name, share in SHARES}
        advantages = np.full(length, random.normal(), np.float32)
        streams = {
            "logprobs": near,
            "ref_logprobs": reference,
            "advantages": advantages,
            "temperatures": np.full(length, temperature, np.float32),
        }
        samples.append(Sample(tokens, weights, index, streams))
    return samples


SHARES = [("rl", 0.8), ("ce", 0.3), ("ref_kl", 0.5)]


def load_reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain_logprobs(model: Any, tokens: Array, temperature: float) -> torch.Tensor:
    """[T - 1] log-probability of each token but the first, from the logits of the sample on its own."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    logits = model(input_ids=ids).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def reference_gradients(folder: Path, samples: list[Sample], config: LossConfig) -> dict[str, Array]:
    model = load_reference(folder)
    counts = {
        name: float(sum(np.count_nonzero(item.weights[name][1:]) for item in samples)) for name, _ in SHARES
    }
    total = torch.zeros(())
    for item in samples:
        stream = {name: torch.from_numpy(np.array(values[1:])) for name, values in item.streams.items()}
        weight = {name: torch.from_numpy(np.array(values[1:])) for name, values in item.weights.items()}
        logprobs = plain_logprobs(model, item.tokens, float(item.streams["temperatures"][0]))
        undivided = plain_logprobs(model, item.tokens, 1.0)
        ratio = (logprobs - stream["logprobs"]).exp()
        gain = ratio * stream["advantages"]
        if isinstance(config, TrustRegionLossConfig):
            inside = (ratio >= config.ratio_min) & (ratio <= config.ratio_max)
            assert item.tokens.size < 9 or not inside.all()
            penalty = config.log_ratio_penalty * (logprobs - stream["logprobs"]) ** 2
            losses = penalty - gain * inside
        else:
            assert isinstance(config, ClippedLossConfig)
            limited = ratio.clip(1 - config.clip_low, 1 + config.clip_high) * stream["advantages"]
            losses = -torch.minimum(gain, limited)
        apart = stream["ref_logprobs"] - logprobs
        total = total + (losses * weight["rl"]).sum() / counts["rl"]
        total = total - (undivided * weight["ce"]).sum() / counts["ce"]
        total = total + ((apart.exp() - 1 - apart) * weight["ref_kl"]).sum() / counts["ref_kl"]
    total.backward()
    return {
        name: item.grad.numpy().copy() for name, item in model.named_parameters() if item.grad is not None
    }


def packed_gradients(
    folder: Path, samples: list[Sample], config: LossConfig, capacity: int, micro_batch_size: int
) -> dict[str, Array]:
    """On one rank of several."""
    process = rank_process()
    model = build_sharded(folder, process)
    engine = build_engine(
        model, process, objective=PolicyGradient(model.vocab_size, build_token_loss(config))
    )
    lengths = [len(item.tokens) for item in samples]
    dealt = pack_balanced(lengths, capacity, process.world_size, multiple=micro_batch_size)[process.rank]
    rows = [[samples[index] for index in row] for row in dealt]
    starts = range(0, len(rows), micro_batch_size)
    batches = [
        build_micro_batch(rows[start : start + micro_batch_size], components=COMPONENTS) for start in starts
    ]
    local = [float(sum(item.count_trainable(name) for item in batches)) for name in COMPONENTS]
    denominators: dict[str, float] = dict(zip(COMPONENTS, process.all_sum(local), strict=True))
    engine.forward_backward(batches, denominators, lr_factor=1.0)
    return gradients_of(model)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_equal_those_of_full_logits_for_any_packing(
    tiny_llama: Path, loss: str, world_size: int
) -> None:
    samples, config = samples_of(tiny_llama), LOSSES[loss]
    expected = reference_gradients(tiny_llama, samples, config)
    # One sample a row, packed rows, everything in one row, two rows at a time.
    for capacity, micro_batch_size in [(31, 1), (40, 2), (200, 1)]:
        ranks = run_ranks(
            packed_gradients, world_size, tiny_llama, samples, config, capacity, micro_batch_size
        )
        for found in ranks:
            assert difference(found, expected) < 1e-5
