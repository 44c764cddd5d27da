"""The order of a step and how a run ends, with fakes that record what is asked of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from contract.batch import MicroBatch, StepBatch, build_micro_batch
from contract.errors import CheckpointError, NonFiniteError
from tests.support.engine import ListSource, rank_process, sample
from tests.support.ranks import run_ranks
from trainer.loop import Loop, Outcome
from trainer.parallel.stop import Decision
from trainer.state import TrainState


def row(num_prompt: int = 1) -> MicroBatch:
    """Four tokens; those after the prompt carry loss."""
    return build_micro_batch([[sample([5, 6, 7, 8], num_prompt)]])


def batch(*rows: MicroBatch, epoch: float = 0.5) -> StepBatch:
    return StepBatch(rows or (row(),), max(1, len(rows)), epoch, {"data/dropped": 2.0})


class FakeProcess:
    """A group of `world_size` ranks that all report what this one does."""

    is_main = True

    def __init__(self, log: list[Any], world_size: int = 1) -> None:
        self.log = log
        self.world_size = world_size

    def all_sum(self, values: list[float]) -> list[float]:
        self.log.append("all_sum")
        return [self.world_size * value for value in values]


class FakeRequests:
    """Answers the n-th question with the n-th decision, and then that the run goes on."""

    def __init__(self, log: list[Any], decisions: Sequence[Decision] = ()) -> None:
        self.log = log
        self.decisions = list(decisions)
        self.steps: list[int] = []

    def arm(self) -> None:
        self.log.append("arm")

    def decide(self, process: Any, step: int) -> Decision:
        self.steps.append(step)
        return self.decisions.pop(0) if self.decisions else Decision()


class FakeEngine:
    """Reports losses as given, and remembers the factor of every update."""

    components = ("ce",)

    def __init__(self, log: list[Any], losses: Sequence[float] = (), norms: Sequence[float] = ()) -> None:
        self.log = log
        self.losses = list(losses)
        self.norms = list(norms)
        self.factors: list[float] = []
        self.announced: list[float | None] = []
        self.denominators: list[dict[str, float]] = []

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        *,
        lr_factor: float | None,
    ) -> dict[str, float]:
        self.log.append("forward_backward")
        self.announced.append(lr_factor)
        self.denominators.append(dict(denominators))
        return {"loss": self.losses.pop(0) if self.losses else 1.0}

    def grad_norm(self) -> float:
        self.log.append("grad_norm")
        return self.norms.pop(0) if self.norms else 2.0

    def update(self, lr_factor: float, grad_norm: float) -> None:
        self.log.append("update")
        self.factors.append(lr_factor)

    def discard(self) -> None:
        self.log.append("discard")


class FakeCheckpoint:
    """Saves every `interval` steps, when asked, and the last; a step that is saved is not saved again. A save
    before the last is in flight until someone waits for it.
    """

    def __init__(self, log: list[Any], interval: int | None = None) -> None:
        self.log = log
        self.interval = interval
        self.saved: list[int] = []
        self.in_flight: int | None = None
        self.error: CheckpointError | None = None

    def poll(self, *, wait: bool = False) -> dict[str, float]:
        self.log.append("await" if wait else "poll")
        if self.error is not None:
            raise self.error
        return self._take() if wait else {}

    def save_if_due(self, step: int, *, last: bool = False, now: bool = False) -> dict[str, float] | None:
        self.log.append("save_last" if last else "save_now" if now else "save_if_due")
        due = last or now or (self.interval is not None and step % self.interval == 0)
        if not due or step in self.saved:
            return None
        self.saved.append(step)
        values = self._take()
        self.in_flight = step
        return {**values, **(self._take() if last else {}), "time/save_ckpt": 0.25}

    def _take(self) -> dict[str, float]:
        step, self.in_flight = self.in_flight, None
        return {} if step is None else {"checkpoint/step": float(step)}


class FakeHook:
    """Notes every call with the step that was reached."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log = log
        self.name = name

    def _note(self, event: str, state: TrainState) -> Mapping[str, float]:
        self.log.append(f"{self.name}.{event}")
        return {f"{self.name}/{event}": float(state.step)}

    def before_training(self, state: TrainState) -> Mapping[str, float]:
        return self._note("before_training", state)

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        return self._note("after_step", state)

    def finish(self, state: TrainState) -> Mapping[str, float]:
        return self._note("finish", state)

    def close(self) -> None:
        raise AssertionError("whoever opened a hook closes it")


class FakeReporter:
    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.steps: list[dict[str, Any]] = []
        self.beside: list[dict[str, Any]] = []

    def report(self, state: TrainState, values: Mapping[str, Any], batch: StepBatch | None) -> None:
        self.log.append("report")
        (self.beside if batch is None else self.steps).append({"step": state.step, **values})


class LoggingSource(ListSource):
    def __init__(self, log: list[Any], batches: Sequence[StepBatch | None]) -> None:
        super().__init__(batches)
        self.log = log

    def next_step(self) -> StepBatch | None:
        self.log.append("next_step")
        return super().next_step()


class Rig:
    """A loop among fakes."""

    def __init__(
        self,
        batches: Sequence[StepBatch | None],
        *,
        total_steps: int = 10**6,
        losses: Sequence[float] = (),
        norms: Sequence[float] = (),
        interval: int | None = None,
        decisions: Sequence[Decision] = (),
        on_non_finite: str = "skip",
        state: TrainState | None = None,
        world_size: int = 1,
        process: Any = None,
    ) -> None:
        self.log: list[Any] = []
        self.engine = FakeEngine(self.log, losses, norms)
        self.checkpoint = FakeCheckpoint(self.log, interval)
        self.reporter = FakeReporter(self.log)
        self.state = state or TrainState()
        self.requests = FakeRequests(self.log, decisions)
        self.source = LoggingSource(self.log, batches)
        parts: dict[str, Any] = {
            "process": process or FakeProcess(self.log, world_size),
            "engine": self.engine,
            "source": self.source,
            "checkpoint": self.checkpoint,
            "hooks": [FakeHook(self.log, "a"), FakeHook(self.log, "b")],
            "reporter": self.reporter,
            "requests": self.requests,
            "state": self.state,
            "schedule": lambda n: 1.0 / n,
            "total_steps": total_steps,
            "on_non_finite": on_non_finite,
        }
        self.loop = Loop(**parts)


def test_a_step_has_the_order_of_the_design() -> None:
    rig = Rig([batch()], total_steps=1)
    rig.loop.fit()
    before = ["arm", "a.before_training", "report", "b.before_training", "report"]
    step = [
        "poll", "next_step", "all_sum", "forward_backward", "all_sum", "grad_norm", "update",
        "report", "save_if_due", "a.after_step", "report", "b.after_step", "report",
    ]  # fmt: skip
    end = ["await", "save_last", "report", "a.finish", "report", "b.finish", "report"]
    assert rig.log == before + step + end


def test_the_metrics_of_a_step_are_global_and_complete() -> None:
    rig = Rig([batch(row(), row(3), epoch=0.75)], total_steps=1, losses=[0.5], norms=[3.0], world_size=2)
    rig.loop.fit()
    (record,) = rig.reporter.steps
    assert rig.engine.denominators == [{"ce": 8.0}]  # 3 + 1 tokens on each of two ranks
    expected = {
        "step": 1, "loss": 1.0, "data/dropped": 2.0, "tokens/ce": 8.0, "grad_norm": 3.0, "lr_factor": 1.0,
        "epoch": 0.75, "step_tokens": 16, "total_tokens": 16, "total_samples": 2, "skipped_updates": 0,
    }  # fmt: skip
    assert {name: record[name] for name in expected} == expected
    assert {"time/data", "time/forward_backward", "time/update", "step_seconds"} <= record.keys()
    assert {"step": 1, "time/save_ckpt": 0.25, "checkpoint/step": 1.0} in rig.reporter.beside
    assert {"step": 0, "a/before_training": 0.0} in rig.reporter.beside
    assert {"step": 1, "b/finish": 1.0} in rig.reporter.beside


def test_a_run_ends_at_the_last_step_and_saves_it_once() -> None:
    rig = Rig([batch()] * 9, total_steps=4, interval=2)
    outcome = rig.loop.fit()
    assert (outcome, outcome.exit_code, rig.state.step) == (Outcome(4), 0, 4)
    assert rig.checkpoint.saved == [2, 4]
    assert rig.engine.factors == [1.0, 1 / 2, 1 / 3, 1 / 4]


def test_a_run_ends_when_all_ranks_are_out_of_data() -> None:
    rig = Rig([batch(), batch()], interval=None)
    outcome = rig.loop.fit()
    assert outcome == Outcome(2)
    assert rig.checkpoint.saved == [2] and rig.log[-4:] == ["a.finish", "report", "b.finish", "report"]


def fit_with_unequal_data() -> str:
    process = rank_process()
    rig = Rig([batch()] * (2 + process.rank), process=process)
    try:
        rig.loop.fit()
    except AssertionError as error:
        return f"{error} after step {rig.state.step}, {rig.engine.factors}"
    return "ended"


def test_data_that_ends_on_one_rank_only_stops_all_before_anything_is_computed() -> None:
    message = "1 of 2 ranks have data for this step after step 2, [1.0, 0.5]"
    assert run_ranks(fit_with_unequal_data, 2) == [message, message]


@pytest.mark.parametrize("step", [4, 7])
def test_a_complete_run_that_is_resumed_trains_and_saves_nothing(step: int) -> None:
    rig = Rig([batch()] * 9, total_steps=4, state=TrainState(step=step, schedule_step=step))
    outcome = rig.loop.fit()
    assert (outcome, rig.state.step, rig.checkpoint.saved) == (Outcome(0), step, [])
    assert "a.before_training" not in rig.log and "next_step" not in rig.log
    assert "a.finish" in rig.log  # an export that the last attempt did not come to


def test_a_resumed_run_goes_on_with_counters_and_schedule() -> None:
    state = TrainState(step=3, num_tokens=100, num_samples=10, num_skipped=1, schedule_step=2)
    rig = Rig([batch()] * 9, total_steps=5, state=state)
    assert rig.loop.fit().steps_done == 2
    assert rig.engine.factors == [1 / 3, 1 / 4]
    assert rig.state == TrainState(step=5, num_tokens=108, num_samples=12, num_skipped=1, schedule_step=4)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize(("ending", "signum", "code"), [("SIGTERM", 15, 143), ("`ckpt pause`", 0, 75)])
def test_a_request_to_end_saves_once_after_the_step_and_leaves_out_the_end(
    steps_before: int, ending: str, signum: int, code: int
) -> None:
    # Two questions come before the first step: before and after what precedes training.
    decisions = [Decision()] * (2 + steps_before - 1) + [Decision(ending, signum)]
    rig = Rig([batch()] * 9, total_steps=9, interval=3, decisions=decisions)
    outcome = rig.loop.fit()
    assert (outcome, outcome.exit_code) == (Outcome(steps_before, ending, signum), code)
    assert rig.state.step == steps_before
    assert rig.checkpoint.saved == ([steps_before] if steps_before else [])
    assert "a.before_training" in rig.log and "a.finish" not in rig.log


def test_a_request_that_came_during_start_up_acts_before_anything_precedes_training() -> None:
    rig = Rig([batch()] * 9, decisions=[Decision("SIGUSR1")])
    assert rig.loop.fit() == Outcome(0, "SIGUSR1")
    assert rig.log == ["arm"]


def test_the_save_in_flight_is_awaited_and_reported_before_the_last_save() -> None:
    rig = Rig([batch()] * 9, total_steps=5, interval=4)
    rig.loop.fit()
    assert rig.log[-8:-4] == ["await", "report", "save_last", "report"]
    steps = [record["checkpoint/step"] for record in rig.reporter.beside if "checkpoint/step" in record]
    assert steps == [4.0, 5.0]


def test_a_save_that_is_in_flight_at_the_end_is_reported_though_there_is_nothing_more_to_save() -> None:
    rig = Rig([batch()] * 9, total_steps=4, interval=4)
    rig.loop.fit()
    assert rig.checkpoint.saved == [4]
    steps = [record["checkpoint/step"] for record in rig.reporter.beside if "checkpoint/step" in record]
    assert steps == [4.0]


def test_save_now_saves_after_the_step_and_the_run_goes_on() -> None:
    decisions = [Decision()] * 3 + [Decision(save=True)]
    rig = Rig([batch()] * 9, total_steps=4, decisions=decisions)
    assert rig.loop.fit() == Outcome(4)
    assert rig.checkpoint.saved == [2, 4]
    now = rig.log.index("save_now")
    assert rig.log[now - 2 : now + 3] == ["b.after_step", "report", "save_now", "report", "poll"]
    assert rig.requests.steps == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("losses", "norms"), [([1.0, math.nan], []), ([1.0, math.inf], []), ([], [2.0, math.nan])]
)
def test_a_loss_or_gradient_that_is_not_finite_skips_the_update_and_not_the_batch(
    losses: list[float], norms: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig([batch()] * 3, total_steps=3, losses=losses, norms=norms)
    with caplog.at_level(logging.WARNING):
        rig.loop.fit()
    assert rig.log.count("discard") == 1
    assert rig.engine.factors == [1.0, 1 / 2]  # the schedule waits with the weights
    assert rig.state == TrainState(step=3, num_tokens=12, num_samples=3, num_skipped=1, schedule_step=2)
    assert [record["skipped_updates"] for record in rig.reporter.steps] == [0, 1, 1]
    assert "step 2: loss" in caplog.text and "update skipped on all ranks" in caplog.text


def test_a_loss_that_is_not_finite_stops_the_run_if_it_is_told_to() -> None:
    rig = Rig([batch()] * 3, losses=[1.0, math.nan], on_non_finite="stop", interval=1)
    with pytest.raises(NonFiniteError, match=r"step 2: loss nan .* nothing of this update is saved"):
        rig.loop.fit()
    assert rig.engine.factors == [1.0] and rig.checkpoint.saved == [1] and rig.state.step == 1
    assert rig.log[-1] == "discard"


def test_a_batch_without_any_trained_token_is_counted_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig([batch(row(4)), batch()], losses=[0.0])
    with caplog.at_level(logging.WARNING):
        rig.loop.fit()
    assert rig.engine.denominators[0] == {"ce": 1.0}  # nothing to divide, and nothing divided by 0
    assert rig.engine.factors == [1.0] and rig.log.count("discard") == 1
    assert rig.engine.announced == [None, 1.0]  # no optimizer may begin an update that never comes
    assert (rig.state.step, rig.state.num_skipped, rig.state.schedule_step) == (2, 1, 1)
    assert "step 1: no token of its 1 samples carries loss; update skipped" in caplog.text


def test_a_failed_save_surfaces_before_the_next_step() -> None:
    rig = Rig([batch()] * 3)
    rig.checkpoint.error = CheckpointError("disk full")
    with pytest.raises(CheckpointError, match="disk full"):
        rig.loop.fit()
    assert "next_step" not in rig.log
