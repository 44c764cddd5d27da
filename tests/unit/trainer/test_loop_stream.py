"""The loop where weights are published and batches are waited for."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import CheckpointError, PublishError
from tests.unit.trainer.loop_rig import Rig, batch
from trainer.loop import Outcome
from trainer.parallel.stop import Decision
from trainer.state import TrainState


def test_every_version_is_published_once_from_the_one_that_the_run_begins_with() -> None:
    rig = Rig([batch()] * 9, total_steps=5, state=TrainState(step=2, schedule_step=2))
    rig.loop.fit()
    assert rig.publisher.versions == [2, 3, 4, 5]
    assert rig.reporter.beside[0] == {"step": 2, "time/publish": 0.5}
    assert [record["time/publish"] for record in rig.reporter.steps] == [0.5] * 3


def test_a_version_that_cannot_be_published_ends_the_run_before_its_save() -> None:
    rig = Rig([batch()] * 9, total_steps=5, interval=1)
    rig.publisher.failing = 2
    with pytest.raises(PublishError, match="does not answer"):
        rig.loop.fit()
    assert rig.publisher.versions == [0, 1] and rig.checkpoint.saved == [1]


def test_a_version_that_cannot_be_published_at_the_start_ends_the_run_before_anything_is_trained() -> None:
    rig = Rig([batch()])
    rig.publisher.failing = 0
    with pytest.raises(PublishError):
        rig.loop.fit()
    assert rig.log == ["arm", "publish"]


def test_a_batch_that_has_not_come_is_asked_for_again_and_the_wait_counts_as_its_data() -> None:
    rig = Rig([batch()] * 2, total_steps=2)
    rig.source.num_pending, rig.source.seconds = 2, 0.01
    assert rig.loop.fit() == Outcome(2)
    asked = [entry for entry in rig.log if entry in ("poll", "next_step", "forward_backward")]
    assert asked == [*["poll", "next_step"] * 3, "forward_backward"] * 2
    assert rig.requests.steps == [0, 0, 0, 0, 1, 1, 1, 2]
    assert all(record["time/data"] >= 0.03 for record in rig.reporter.steps)
    assert all(record["step_seconds"] >= record["time/data"] for record in rig.reporter.steps)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("ending", "signum", "code"), [("SIGTERM", 15, 143), ("`ckpt pause`", 0, 75)])
def test_a_request_to_end_while_a_batch_is_waited_for_saves_what_was_trained(
    steps_before: int, ending: str, signum: int, code: int
) -> None:
    rig = Rig([batch()] * 9, total_steps=9)
    rig.source.num_pending = 2
    # Two decisions precede the first step; each step has two while it waits, and one after it.
    rig.requests.decisions = [Decision()] * (2 + 3 * steps_before + 1) + [Decision(ending, signum)]
    outcome = rig.loop.fit()
    assert (outcome, outcome.exit_code) == (Outcome(steps_before, ending, signum), code)
    assert rig.checkpoint.saved == ([steps_before] if steps_before else [])
    assert rig.log.count("forward_backward") == steps_before and "a.finish" not in rig.log


def test_save_now_acts_while_a_batch_is_waited_for() -> None:
    rig = Rig([batch()] * 9, total_steps=2)
    rig.source.num_pending = 1
    rig.requests.decisions = [Decision()] * 4 + [Decision(save=True)]
    assert rig.loop.fit() == Outcome(2)
    assert rig.checkpoint.saved == [1, 2]


def test_a_failed_save_surfaces_while_a_batch_is_waited_for() -> None:
    rig = Rig([batch()])
    rig.source.num_pending = 10**9

    def fail(process: Any, step: int) -> Decision:
        rig.checkpoint.error = CheckpointError("disk full") if rig.log.count("next_step") == 3 else None
        return Decision()

    rig.requests.decide = fail
    with pytest.raises(CheckpointError, match="disk full"):
        rig.loop.fit()


@pytest.mark.parametrize(("ending", "signum", "code"), [("SIGTERM", 15, 143), ("`ckpt pause`", 0, 75)])
def test_a_hook_that_ends_its_last_wait_by_a_request_ends_the_run_by_it(
    ending: str, signum: int, code: int
) -> None:
    rig = Rig([batch()] * 9, total_steps=1)
    # Two decisions precede the step, and one follows it; the next one is that of the first hook.
    rig.requests.decisions = [Decision()] * 3 + [Decision(ending, signum)]
    rig.hooks[0].on_finish = lambda: rig.requests.decide(None, rig.state.step)
    outcome = rig.loop.fit()
    assert (outcome, outcome.exit_code) == (Outcome(1, ending, signum), code)
    assert rig.checkpoint.saved == [1] and "b.finish" in rig.log
