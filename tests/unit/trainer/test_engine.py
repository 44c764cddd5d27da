"""What the engine promises beside the update: skipping, evaluating, sampling, compiling."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from contract.batch import Sample, StepBatch, build_micro_batch
from tests.support.engine import (
    Array,
    build_engine,
    build_sharded,
    difference,
    group_of_one,
    in_new_process,
    micro_batches,
    rank_process,
    sample,
    step_batch,
    train,
    weights_of,
)
from tests.support.ranks import run_ranks
from tests.unit.trainer.model.families import write_family
from trainer.config.optimizer import AdamWConfig
from trainer.hooks.base import BaseHook
from trainer.model.causal_lm import CausalLM
from trainer.objective.base import DeviceBatch, Head
from trainer.objective.cross_entropy import CrossEntropy
from trainer.parallel.process import Process
from trainer.state import TrainState

ROWS = [[sample([5, 6, 7, 8, 9], 2)], [sample([11, 12, 13], 1), sample([21, 22, 23, 24], 1)]]


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights so large that its greedy text varies."""
    return write_family(tmp_path_factory.mktemp("lively"), "llama")


class SpoiledLoss:
    """Cross-entropy that is NaN in one call on one rank."""

    def __init__(self, vocab_size: int, spoiled_call: int | None) -> None:
        self._inner = CrossEntropy(vocab_size)
        self._calls_left = spoiled_call

    @property
    def components(self) -> tuple[str, ...]:
        return self._inner.components

    def __call__(
        self, hidden_TD: torch.Tensor, head: Head, batch: DeviceBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, reported = self._inner(hidden_TD, head, batch, denominators)
        if self._calls_left is not None:
            self._calls_left -= 1
            if self._calls_left == 0:
                return loss * math.nan, {"loss": reported["loss"] * math.nan}
        return loss, reported


class WeightsHook(BaseHook):
    """Keeps the full weights after every step."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.history: list[dict[str, Array]] = [weights_of(model)]

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        self.history.append(weights_of(self.model))
        return {}


def train_with_nan_on_rank_1(folder: str) -> tuple[list[float], list[dict[str, Any]], TrainState]:
    """How far the weights moved in each of four steps; in the third the loss of rank 1 is NaN."""
    process = rank_process()
    model = build_sharded(folder, process)
    objective = SpoiledLoss(model.vocab_size, 3 if process.rank == 1 else None)
    engine = build_engine(model, process, objective=objective)
    hook = WeightsHook(model)
    steps, state = train(engine, process, [step_batch(ROWS, process)] * 4, hooks=[hook])
    moved = [difference(before, after) for before, after in zip(hook.history, hook.history[1:], strict=False)]
    return moved, steps, state


def test_a_loss_that_is_nan_on_one_rank_changes_no_weight_on_any(tiny_llama: Path) -> None:
    first, second = run_ranks(train_with_nan_on_rank_1, 2, str(tiny_llama))
    assert first[0] == second[0]
    for moved, steps, state in (first, second):
        assert moved[2] == 0.0 and min(moved[0], moved[1], moved[3]) > 1e-4
        assert math.isnan(steps[2]["loss"]) and math.isnan(steps[2]["grad_norm"])
        assert math.isfinite(steps[3]["loss"]) and math.isfinite(steps[3]["grad_norm"])
        # The update after it uses the learning rate that the skipped one would have had.
        assert [item["lr_factor"] for item in steps] == [1, 1 / 2, 1 / 3, 1 / 3]
        assert (state.step, state.num_skipped, state.schedule_step) == (4, 1, 3)


def greedy_reference(folder: Path, prompt: Sequence[int], length: int, stop: int | None) -> list[int]:
    """transformers' own greedy continuation, without the stop token."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=length,
        eos_token_id=stop if stop is not None else -1,
        pad_token_id=0,
    )[0].tolist()[len(prompt) :]
    return output[: output.index(stop)] if stop in output else output


PROMPTS = [[5, 6, 7], [40], [9, 90, 19, 91, 29]]


def continue_on(process: Process, folder: str, stop: int) -> tuple[list[list[int]], list[list[int]]]:
    model = build_sharded(folder, process)
    engine = build_engine(model, process)
    free = engine.continue_greedily(PROMPTS, 12, frozenset())
    stopped = engine.continue_greedily(PROMPTS, 12, frozenset({stop, 10**6}))
    assert model.training and all(isinstance(item, DTensor) for item in model.parameters())
    return free, stopped


def continue_on_ranks(folder: str, stop: int) -> tuple[list[list[int]], list[list[int]]]:
    return continue_on(rank_process(), folder, stop)


def test_the_greedy_continuation_is_that_of_transformers_on_one_and_two_ranks(
    lively: Path, process: Process
) -> None:
    free = [greedy_reference(lively, prompt, 12, None) for prompt in PROMPTS]
    assert len(set(free[0])) > 4, "a constant continuation would prove nothing"
    stop = free[0][3]
    stopped = [greedy_reference(lively, prompt, 12, stop) for prompt in PROMPTS]
    assert len(stopped[0]) <= 3
    for of_rank in (
        continue_on(process, str(lively), stop),
        *run_ranks(continue_on_ranks, 2, str(lively), stop),
    ):
        assert of_rank == (free, stopped)


def evaluate_then_train(folder: str, settings: dict[str, Any]) -> tuple[float, float, dict[str, Array]]:
    """Sums of an evaluation, and the weights after an update with an optimizer that was built after it."""
    process = rank_process()
    model = build_sharded(folder, process, **settings)
    sums = build_engine(model, process).evaluate(micro_batches(ROWS, process, 1))
    assert model.training and all(isinstance(item, DTensor) for item in model.parameters())
    engine = build_engine(model, process, optimizer=AdamWConfig(lr=0.01))
    train(engine, process, [step_batch(ROWS, process)])
    loss_sum, num_tokens = process.all_sum([sums["loss"], sums["ce_tokens"]])
    return loss_sum, num_tokens, weights_of(model)


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}], ids=["freed", "gathered"])
def test_evaluation_sums_over_all_rows_and_leaves_the_shards_as_they_were(
    tiny_llama: Path, process: Process, settings: dict[str, Any]
) -> None:
    model = build_sharded(tiny_llama, process)
    engine = build_engine(model, process, optimizer=AdamWConfig(lr=0.01))
    before = weights_of(model)
    sums = engine.evaluate(micro_batches(ROWS, process, 1))
    assert sums["ce_tokens"] == 8.0 and difference(weights_of(model), before) == 0.0
    trained = engine.forward_backward(micro_batches(ROWS, process, 1), {"ce": 1.0}, lr_factor=None)
    assert sums["loss"] == pytest.approx(trained["loss"], rel=1e-6)
    engine.discard()
    train(engine, process, [step_batch(ROWS, process)])
    expected = weights_of(model)
    assert difference(expected, before) > 1e-3
    for loss_sum, num_tokens, weights in run_ranks(evaluate_then_train, 2, str(tiny_llama), settings):
        assert (loss_sum, num_tokens) == (pytest.approx(sums["loss"], rel=1e-6), 8.0)
        assert difference(weights, expected) <= 1e-5


def test_a_discarded_gradient_leaves_no_trace(tiny_llama: Path, process: Process) -> None:
    model = build_sharded(tiny_llama, process)
    engine = build_engine(model, process)
    parts = micro_batches(ROWS, process, 2)
    engine.forward_backward(parts, {"ce": 8.0}, lr_factor=None)
    norm = engine.grad_norm()
    engine.discard()
    assert engine.grad_norm() == 0.0
    engine.forward_backward(parts, {"ce": 8.0}, lr_factor=None)
    assert engine.grad_norm() == norm


def documents(step: int, length: int = 32) -> list[Sample]:
    """Up to four documents of other lengths in every step, which do not always fill the row."""
    random = np.random.default_rng(step)
    cuts = np.sort(random.choice(np.arange(2, length), random.integers(1, 5), replace=False))
    bounds = [0, *cuts.tolist()]
    return [
        sample(random.integers(3, 120, end - start).tolist()) for start, end in itertools.pairwise(bounds)
    ]


def train_compiled(folder: str) -> tuple[list[float], list[float], list[int], int]:
    """Losses and norms as differences to the eager model, and the number of graphs after every batch."""
    from torch._dynamo.utils import counters

    # Which graphs there are is decided before any code is generated, and generating it takes half a minute.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    with group_of_one() as process:
        compiled = build_engine(build_sharded(folder, process, compile=True), process)
        eager = build_engine(build_sharded(folder, process), process)
        losses, norms, graphs = [], [], []
        for step in range(20):
            part = build_micro_batch([documents(step), documents(step + 100)], pad_to=32, components=["ce"])
            results = []
            for engine in (compiled, eager):
                counts = {"ce": float(part.count_trainable("ce"))}
                loss = engine.forward_backward([part], counts, lr_factor=None)["loss"]
                results.append((loss, engine.grad_norm()))
                engine.discard()
            losses.append(results[0][0] - results[1][0])
            norms.append(results[0][1] / results[1][1] - 1.0)
            graphs.append(counters["stats"]["unique_graphs"])
        num_runs = counters["stats"]["calls_captured"]
    return losses, norms, graphs, num_runs


def test_compiled_blocks_give_the_loss_of_eager_ones_and_no_row_compiles_them_again(tmp_path: Path) -> None:
    # More layers than torch compiles versions of one function: they must share.
    folder = write_family(tmp_path / "deep", "llama", {"num_hidden_layers": 10, "initializer_range": 0.1})
    losses, norms, graphs, num_runs = in_new_process(train_compiled, str(folder), timeout=200)
    assert losses == pytest.approx([0.0] * 20, abs=1e-5)
    assert norms == pytest.approx([0.0] * 20, abs=1e-5)
    assert num_runs > 0 and 0 < graphs[0] <= 8
    assert graphs == [graphs[0]] * 20


def test_every_row_of_a_step_counts_whatever_its_length(tiny_llama: Path, process: Process) -> None:
    engine = build_engine(build_sharded(tiny_llama, process), process)
    batch = StepBatch([build_micro_batch([row]) for row in ROWS], 3, 0.0)
    together = engine.forward_backward(batch.micro_batches, {"ce": 8.0}, lr_factor=None)["loss"]
    engine.discard()
    apart = [
        engine.forward_backward([part], {"ce": 8.0}, lr_factor=None)["loss"] for part in batch.micro_batches
    ]
    assert together == pytest.approx(sum(apart), rel=1e-6)
