"""Ten updates compared with a plain transformers + torch loop, however rows are split, packed and sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.batch import Sample
from contract.packing import pack
from tests.support.engine import (
    Array,
    build_engine,
    build_sharded,
    difference,
    gradients_of,
    rank_process,
    sample,
    step_batch,
    train,
    weights_of,
)
from tests.support.ranks import run_ranks
from trainer.config.optimizer import AdamWConfig
from trainer.parallel.process import Process

NUM_STEPS, SEQ_LEN = 10, 32
LR, WEIGHT_DECAY, BETAS, EPS, MAX_NORM = 3e-3, 0.1, (0.9, 0.95), 1e-8, 0.5


@dataclass(frozen=True)
class Variant:
    """One way to compute the same ten updates."""

    micro_batch_size: int
    is_packed: bool
    dp_replicate: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Array]


VARIANTS: dict[int, dict[str, Variant]] = {
    1: {
        "rows alone": Variant(1, False),
        "2 rows at a time": Variant(2, False),
        "4 packed rows at a time": Variant(4, True),
        "sdpa": Variant(2, True, settings={"attention": "sdpa"}),
        "activation checkpointing": Variant(1, True, settings={"activation_checkpointing": "block"}),
    },
    2: {
        "packed rows": Variant(1, True),
        "4 rows at a time, gathered between": Variant(4, False, settings={"reshard_after_forward": False}),
        "2 packed rows at a time, activation checkpointing": Variant(
            2, True, settings={"activation_checkpointing": "block"}
        ),
    },
    4: {
        "packed rows": Variant(1, True),
        "replicas, 2 rows at a time, one forward": Variant(2, False, 2),
        "replicas, several forwards, gathered between": Variant(
            1, False, 2, {"reshard_after_forward": False}
        ),
    },
}
CASES = [(world_size, name) for world_size, variants in VARIANTS.items() for name in variants]


def conversations(step: int) -> list[Sample]:
    """Eight samples of very unequal length; one has no loss at all, the others a prompt without loss."""
    random = np.random.default_rng([7, step])
    lengths = [3, 31, 9, 24, 5, 17, 2, 12]
    prompts = [1, 20, 3, 24, 2, 1, 1, 10]
    return [
        sample(random.integers(3, 259, length).tolist(), prompt, sample_id)
        for sample_id, (length, prompt) in enumerate(zip(lengths, prompts, strict=True))
    ]


def rows_of(step: int, is_packed: bool) -> list[list[Sample]]:
    samples = conversations(step)
    if not is_packed:
        return [[item] for item in samples]
    rows = pack([len(item.tokens) for item in samples], SEQ_LEN)
    assert len(rows) < len(samples)
    return [[samples[index] for index in row] for row in rows]


def reference_loss(model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    """Mean cross-entropy over the trained tokens of a padded batch, from transformers' own logits."""
    longest = max(len(item.tokens) for item in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full((len(samples), longest), -100)
    mask = torch.zeros(len(samples), longest, dtype=torch.long)
    for index, item in enumerate(samples):
        length, row = len(item.tokens), torch.from_numpy(item.tokens)
        tokens[index, :length], mask[index, :length] = row, 1
        labels[index, :length] = torch.where(torch.from_numpy(item.weights["ce"]) > 0, row, -100)
    logits = model(input_ids=tokens, attention_mask=mask).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def load_reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Trace:
    """What an ordinary loop gives on one process."""
    model = load_reference(tiny_llama)
    named = dict(model.named_parameters())
    norms = [item for name, item in named.items() if "norm" in name]
    matrices = [item for name, item in named.items() if "norm" not in name]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, grad_norms = [], []
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR / (step + 1)
        loss = reference_loss(model, conversations(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        grad_norms.append(norm.item())
    assert min(grad_norms) > MAX_NORM, "the norm must be clipped in every step"
    return Trace(losses, grad_norms, {name: item.detach().numpy() for name, item in named.items()})


def train_variant(folder: str, variant: Variant, process: Process) -> Trace:
    """The same ten updates through the project's own loop."""
    settings = variant.settings
    model = build_sharded(folder, process, dp_replicate=variant.dp_replicate, **settings)
    section = AdamWConfig(
        lr=LR, weight_decay=WEIGHT_DECAY, betas=list(BETAS), eps=EPS, max_grad_norm=MAX_NORM
    )
    is_varlen = settings.get("attention", "varlen") == "varlen"
    engine = build_engine(model, process, optimizer=section, is_varlen=is_varlen)
    batches = [
        step_batch(rows_of(step, variant.is_packed), process, variant.micro_batch_size)
        for step in range(NUM_STEPS)
    ]
    steps, _ = train(engine, process, batches)
    return Trace([item["loss"] for item in steps], [item["grad_norm"] for item in steps], weights_of(model))


def train_all(folder: str) -> dict[str, Trace]:
    process = rank_process()
    variants = VARIANTS[process.world_size]
    return {name: train_variant(folder, variant, process) for name, variant in variants.items()}


@pytest.fixture(scope="module")
def traces(tiny_llama: Path) -> dict[int, list[dict[str, Trace]]]:
    """World size to the traces of every rank."""
    return {world_size: run_ranks(train_all, world_size, str(tiny_llama)) for world_size in VARIANTS}


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_ten_updates_equal_a_plain_loop(
    world_size: int, name: str, traces: dict[int, list[dict[str, Trace]]], reference: Trace
) -> None:
    for of_rank in traces[world_size]:
        trace = of_rank[name]
        assert trace.losses == pytest.approx(reference.losses, abs=1e-5)
        assert trace.grad_norms == pytest.approx(reference.grad_norms, abs=1e-5)
        assert difference(trace.weights, reference.weights) <= 1e-5


def gradient_of(folder: str, rows: Sequence[Sequence[Sample]], process: Process, size: int) -> Any:
    """Loss, gradient norm and full gradients of one update, taken before they are used."""
    model = build_sharded(folder, process)
    engine = build_engine(model, process)
    batch = step_batch(rows, process, size)
    local = [float(sum(item.count_trainable("ce") for item in batch.micro_batches))]
    count = process.all_sum(local)[0]
    sums = engine.forward_backward(batch.micro_batches, {"ce": count}, lr_factor=None)
    return process.all_sum([sums["loss"]])[0], engine.grad_norm(), gradients_of(model)


UNEQUAL = [[sample([5, 6, 7, 8, 9, 10], num_prompt=5)], [sample([11, 12, 13, 14], num_prompt=1)]]
LEFT_EMPTY = [[sample([5, 6, 7, 8], num_prompt=4)], [sample([11, 12, 13, 14], num_prompt=1)]]
MISSING_ROW = [[sample([5, 6, 7]), sample([9, 8, 7, 6], num_prompt=2)]]
EIGHT = [[item] for item in conversations(0)]


def gradients_on_ranks(folder: str) -> list[Any]:
    process = rank_process()
    return [gradient_of(folder, rows, process, 1) for rows in (UNEQUAL, LEFT_EMPTY, MISSING_ROW)]


def test_ranks_with_few_many_and_no_trained_tokens_give_the_gradient_of_one_rank(
    tiny_llama: Path, process: Process
) -> None:
    shared = run_ranks(gradients_on_ranks, 2, str(tiny_llama))
    for index, rows in enumerate((UNEQUAL, LEFT_EMPTY, MISSING_ROW)):
        loss, norm, gradients = gradient_of(str(tiny_llama), rows, process, 2)
        plain = load_reference(tiny_llama)
        expected = reference_loss(plain, [item for row in rows for item in row])
        expected.backward()
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        for of_rank in shared:
            assert of_rank[index][0] == pytest.approx(loss, abs=1e-6)
            assert of_rank[index][1] == pytest.approx(norm, abs=1e-5)
            assert difference(of_rank[index][2], gradients) <= 1e-6
        own = {name: item.grad.numpy() for name, item in plain.named_parameters()}
        assert difference(gradients, own) <= 1e-6


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_no_micro_batch_size_changes_loss_or_gradient(tiny_llama: Path, process: Process, size: int) -> None:
    plain = load_reference(tiny_llama)
    expected = reference_loss(plain, conversations(0))
    expected.backward()
    own = {name: item.grad.numpy() for name, item in plain.named_parameters()}
    loss, norm, gradients = gradient_of(str(tiny_llama), EIGHT, process, size)
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    assert norm == pytest.approx(np.sqrt(sum(float((item**2).sum()) for item in own.values())), abs=1e-5)
    assert difference(gradients, own) <= 1e-6
