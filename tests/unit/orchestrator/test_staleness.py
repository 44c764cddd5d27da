"""Lead and age, in numbers."""

from __future__ import annotations

import pytest

from orchestrator.staleness import age_in_batch, is_too_old, last_step_allowed


def test_a_token_of_the_version_that_a_batch_is_trained_from_has_age_0() -> None:
    assert [age_in_batch(1, 0), age_in_batch(5, 4), age_in_batch(5, 2)] == [0, 0, 2]


@pytest.mark.parametrize(
    ("version", "max_lead", "max_age", "max_steps", "last"),
    [
        (0, 0, 4, 100, 1),  # synchronous: batch 1 is made of version 0 only
        (0, 1, 4, 100, 2),
        (7, 3, 4, 100, 11),
        (7, 3, 1, 100, 9),  # further ahead would be too old from the start
        (7, 3, 0, 100, 8),
        (98, 3, 4, 100, 100),  # nothing beyond the last batch
    ],
)
def test_batches_are_sampled_up_to_the_lead_ahead(
    version: int, max_lead: int, max_age: int, max_steps: int, last: int
) -> None:
    assert last_step_allowed(version, max_lead, max_age, max_steps) == last


def test_a_group_is_too_old_when_its_oldest_token_is() -> None:
    assert not is_too_old(5, 2, 2)
    assert is_too_old(6, 2, 2)
    assert not is_too_old(99, None, 0)
