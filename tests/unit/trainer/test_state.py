"""Counters of a run."""

from __future__ import annotations

from trainer.state import TrainState


def test_an_update_counts_its_batch_and_moves_the_schedule() -> None:
    state = TrainState()
    state.advance(num_tokens=10, num_samples=2, skipped=False)
    state.advance(num_tokens=5, num_samples=1, skipped=False)
    assert state == TrainState(step=2, num_tokens=15, num_samples=3, num_skipped=0, schedule_step=2)


def test_a_skipped_update_counts_its_batch_and_not_for_the_schedule() -> None:
    state = TrainState(step=4, schedule_step=4)
    state.advance(num_tokens=10, num_samples=2, skipped=True)
    assert state == TrainState(step=5, num_tokens=10, num_samples=2, num_skipped=1, schedule_step=4)


def test_the_state_is_all_counters_as_json_values() -> None:
    state = TrainState(step=1, num_tokens=2, num_samples=3, num_skipped=4, schedule_step=5)
    assert TrainState(**state.state_dict()) == state
    assert {type(value) for value in state.state_dict().values()} == {int}
