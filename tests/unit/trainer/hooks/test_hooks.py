"""Validation, samples, garbage collection and the profiler."""

from __future__ import annotations

import gc
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from contract.batch import MicroBatch, build_micro_batch
from tests.support.engine import build_engine, build_sharded, micro_batches, rank_process, sample
from tests.support.ranks import run_ranks
from trainer.engine import Engine
from trainer.hooks.base import BaseHook
from trainer.hooks.housekeeping import GarbageHook, ProfileHook
from trainer.hooks.sample import Prompt, SampleHook
from trainer.hooks.validate import ValidateHook
from trainer.parallel.process import Process
from trainer.parallel.stop import Requests
from trainer.state import TrainState


class Rows:
    """Held-out rows; `stop` receives a signal while the second one is read."""

    def __init__(self, rows: Sequence[MicroBatch], stop: Requests | None = None) -> None:
        self.rows = rows
        self.stop = stop
        self.num_read = 0

    def micro_batches(self) -> Iterable[MicroBatch]:
        for row in self.rows:
            self.num_read += 1
            if self.stop is not None and self.num_read == 2:
                self.stop.signum = 15
            yield row


ROWS = [[sample([5, 6, 7, 8], 1)], [sample([9, 10, 11, 12, 13, 14], 5)], [sample([20, 21, 22], 3)]]


def validate(process: Process, folder: str) -> tuple[Mapping[str, float], float]:
    """What the hook reports, and the loss of each trained token by hand."""
    model = build_sharded(folder, process)
    engine = build_engine(model, process)
    hook = ValidateHook(
        Rows(micro_batches(ROWS, process, 1)), engine, process, Requests(), interval=2, at_start=True
    )
    told = hook.before_training(TrainState())
    sums = engine.evaluate([build_micro_batch([row]) for row in ROWS])
    return told, sums["loss"]


def validate_on_ranks(folder: str) -> tuple[Mapping[str, float], float]:
    return validate(rank_process(), folder)


def test_the_validation_loss_is_the_mean_over_the_tokens_of_all_ranks(
    tiny_llama: Path, process: Process
) -> None:
    results = [validate(process, str(tiny_llama)), *run_ranks(validate_on_ranks, 2, str(tiny_llama))]
    for told, loss_sum in results:
        assert told["validation/tokens"] == 4
        assert told["validation/loss"] == pytest.approx(loss_sum / 4, rel=1e-6)
    assert results[1][0] == results[2][0]


class CountingEngine:
    """Gives every row a loss of 3 on 2 tokens."""

    components = ("ce",)

    def __init__(self) -> None:
        self.num_evaluations = 0

    def evaluate(self, rows: Iterable[MicroBatch]) -> dict[str, float]:
        self.num_evaluations += 1
        count = sum(1 for _ in rows)
        return {"loss": 3.0 * count, "ce_tokens": 2.0 * count}


def validating(process: Process, rows: Rows, stop: Requests, **settings: Any) -> tuple[ValidateHook, Any]:
    engine = CountingEngine()
    hook = ValidateHook(rows, cast(Engine, engine), process, stop, **settings)
    return hook, engine


def test_validation_comes_at_the_start_every_interval_and_once_at_the_end(process: Process) -> None:
    rows = Rows([build_micro_batch([row]) for row in ROWS])
    hook, engine = validating(process, rows, Requests(), interval=2, at_start=True)
    assert hook.before_training(TrainState())["validation/loss"] == 1.5
    told = [bool(hook.after_step(TrainState(step=step))) for step in (1, 2, 3)]
    assert told == [False, True, False]
    assert hook.finish(TrainState(step=3)) and engine.num_evaluations == 3
    hook.after_step(TrainState(step=4))
    assert hook.finish(TrainState(step=4)) == {} and engine.num_evaluations == 4
    late, _ = validating(process, rows, Requests(), interval=2, at_start=False)
    assert late.before_training(TrainState()) == {}


def test_rows_without_any_trained_token_have_no_mean(process: Process) -> None:
    hook, _ = validating(process, Rows([]), Requests(), interval=1, at_start=True)
    assert math.isnan(hook.before_training(TrainState())["validation/loss"])


def test_a_signal_ends_a_validation_after_the_row_and_reports_no_part_of_it(process: Process) -> None:
    stop = Requests()
    rows = Rows([build_micro_batch([row]) for row in ROWS], stop)
    hook, _ = validating(process, rows, stop, interval=1, at_start=True)
    assert hook.after_step(TrainState(step=1)) == {}
    assert rows.num_read == 2


class EchoEngine:
    """Continues every prompt with its first token plus the number of calls so far."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, frozenset[int]]] = []

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: frozenset[int]
    ) -> list[list[int]]:
        self.calls.append((max_new_tokens, stop_ids))
        return [[prompt[0] + len(self.calls)] for prompt in prompts]


def test_samples_are_shown_before_and_beside_those_after() -> None:
    engine, shown = EchoEngine(), []
    hook = SampleHook(
        cast(Engine, engine),
        [Prompt("one", [10, 11]), Prompt("two", [20])],
        decode=lambda ids: f" <{ids[0]}>\n",
        stop_ids=frozenset({2}),
        max_new_tokens=7,
        show=lambda title, rows: shown.append((title, list(rows))),
    )
    hook.before_training(TrainState(step=3))
    assert hook.after_step(TrainState(step=4)) == {}
    hook.finish(TrainState(step=5))
    assert shown == [
        (
            "Samples before training (step 3)",
            [{"prompt": "one", "answer": "<11>"}, {"prompt": "two", "answer": "<21>"}],
        ),
        (
            "Samples after training (step 5)",
            [
                {"prompt": "one", "before": "<11>", "after": "<12>"},
                {"prompt": "two", "before": "<21>", "after": "<22>"},
            ],
        ),
    ]
    assert engine.calls == [(7, frozenset({2}))] * 2


def test_samples_of_a_run_that_was_complete_already_have_no_before() -> None:
    shown: list[Any] = []
    hook = SampleHook(
        cast(Engine, EchoEngine()),
        [Prompt("one", [10])],
        decode=lambda ids: str(ids[0]),
        stop_ids=frozenset(),
        max_new_tokens=1,
        show=lambda title, rows: shown.extend(rows),
    )
    hook.finish(TrainState(step=5))
    assert shown == [{"prompt": "one", "before": "", "after": "11"}]


def test_garbage_is_collected_at_fixed_steps_only_and_normally_again_after() -> None:
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    hook = GarbageHook(interval=2)
    hook.before_training(TrainState())
    gc.callbacks.append(note)
    try:
        assert not gc.isenabled()
        for step in (1, 2, 3, 4):
            hook.after_step(TrainState(step=step))
        assert collections == [1, 1]
    finally:
        gc.callbacks.remove(note)
        hook.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def profile(folder: Path, num_steps: int, *, start_step: int = 2, finish: bool = True) -> list[str]:
    """Names of the traces of a run that begins at step 10."""
    hook = ProfileHook(folder, 3, start_step=start_step, num_steps=2, with_stack=False)
    hook.before_training(TrainState(step=10))
    for step in range(11, 11 + num_steps):
        torch.zeros(step).add_(1)
        hook.after_step(TrainState(step=step))
    if finish:
        hook.finish(TrainState(step=10 + num_steps))
    hook.close()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_trace_covers_the_steps_asked_for_counted_in_this_process(tmp_path: Path) -> None:
    assert profile(tmp_path / "a", 5) == ["step_13_rank_3.json"]
    events = json.loads((tmp_path / "a" / "step_13_rank_3.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::add_" for event in events) == 2


def test_a_run_that_ends_within_the_traced_steps_still_writes_them(tmp_path: Path) -> None:
    assert profile(tmp_path / "a", 2) == ["step_12_rank_3.json"]
    assert profile(tmp_path / "b", 2, finish=False) == []


def test_a_run_too_short_for_its_trace_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert profile(tmp_path / "a", 2, start_step=9) == []
    assert "no profiler trace: the run did 2 steps, profiler.start_step = 9" in caplog.text


def test_a_hook_that_overrides_nothing_does_nothing() -> None:
    hook, state = BaseHook(), TrainState(step=1)
    hook.close()
    assert [hook.before_training(state), hook.after_step(state), hook.finish(state)] == [{}, {}, {}]
    assert state == TrainState(step=1)
