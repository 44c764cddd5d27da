"""The order of a step and how a run ends."""

from __future__ import annotations

import logging
import math

import pytest

from contract.errors import CheckpointError, NonFiniteError
from tests.support.engine import rank_process
from tests.support.ranks import run_ranks
from tests.unit.trainer.loop_rig import Rig, batch, row
from trainer.loop import Outcome
from trainer.parallel.stop import Decision
from trainer.state import TrainState


def test_a_step_has_the_order_of_the_design() -> None:
    rig = Rig([batch()], total_steps=1)
    rig.loop.fit()
    before = ["arm", "publish", "report", "a.before_training", "report", "b.before_training", "report"]
    step = [
        "poll", "next_step", "all_sum", "forward_backward", "all_sum", "grad_norm", "update", "publish",
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
    # The end that the last attempt did not come to: an export, an evaluation of the last version.
    assert rig.publisher.versions == [step] and "a.finish" in rig.log


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
