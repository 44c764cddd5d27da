"""Rates that follow from the numbers of a step, computed by hand."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from contract.batch import StepBatch, build_micro_batch
from telemetry.console import Console
from telemetry.metrics import Metrics
from tests.support.engine import sample
from trainer.model.build import ModelShape
from trainer.parallel.device import Device
from trainer.parallel.process import Process
from trainer.reporter import Peak, StepReporter
from trainer.state import TrainState

SHAPE = ModelShape(
    num_parameters=1200,
    num_matmul_parameters=1000,
    num_block_parameters=800,
    is_tied=False,
    num_layers=2,
    attention_width=16,
    hidden_size=16,
    vocab_size=100,
)


class FakeProcess:
    world_size = 2
    device = Device(torch.device("cpu"))

    def __init__(self, is_main: bool) -> None:
        self.is_main = is_main


class Taken:
    """Metrics and console that keep what they get."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.shown: list[tuple[int, dict[str, Any]]] = []

    def log(self, step: int, record: dict[str, Any]) -> None:
        self.logged.append((step, record))

    def step(self, step: int, record: dict[str, Any]) -> None:
        self.shown.append((step, record))


def reporter(taken: Taken, *, is_main: bool = True) -> StepReporter:
    return StepReporter(
        cast(Process, FakeProcess(is_main)),
        cast(Metrics, taken),
        cast(Console, taken),
        SHAPE,
        Peak(2.0, "test"),
        peak_lr=3e-4,
        total_steps=10,
    )


# Documents of 3 and 5 tokens; four tokens of padding are no document.
BATCH = StepBatch([build_micro_batch([[sample([1, 2, 3])], [sample([4, 5, 6, 7, 8])]], pad_to=6)], 2, 0.5)
VALUES = {"loss": 1.5, "lr_factor": 0.5, "step_tokens": 160, "step_seconds": 4.0}


def test_a_step_gets_its_rates_and_goes_to_sinks_and_console() -> None:
    taken = Taken()
    rig = reporter(taken)
    rig.report(TrainState(step=4), VALUES, BATCH)
    ((step, record),) = taken.logged
    assert step == 4 and taken.shown == [(4, record)]
    assert record["loss"] == 1.5 and record["lr"] == pytest.approx(1.5e-4)
    assert record["tokens_per_second"] == 40.0 and record["eta_seconds"] == 6 * 4.0
    mean_context = ((1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)) / 8
    flops = 6 * 1000 + 12 * 2 * 16 * mean_context
    assert record["mfu"] == pytest.approx(40.0 * flops / (2 * 2e12))
    assert record["memory_bytes"] > 10 * 2**20


def test_metrics_beside_a_step_go_to_the_sinks_alone_and_are_remembered() -> None:
    taken = Taken()
    rig = reporter(taken)
    rig.report(TrainState(step=4), VALUES, BATCH)
    rig.report(TrainState(step=4), {"validation/loss": 2.0, "loss": None}, None)
    assert taken.logged[1] == (4, {"validation/loss": 2.0, "loss": None}) and len(taken.shown) == 1
    assert rig.last_values["validation/loss"] == 2.0 and rig.last_values["loss"] is None
    assert rig.last_values["lr"] == pytest.approx(1.5e-4)


def test_other_ranks_report_nothing() -> None:
    taken = Taken()
    rig = reporter(taken, is_main=False)
    rig.report(TrainState(step=4), VALUES, BATCH)
    assert taken.logged == [] and taken.shown == [] and rig.last_values == {}
