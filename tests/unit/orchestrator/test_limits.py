"""When a run that cannot learn ends."""

from __future__ import annotations

import pytest

from contract.errors import EnvironmentFailure
from orchestrator.config import RolloutConfig
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.group import JudgedGroup, Outcome
from orchestrator.limits import EmptyRule, ErrorRate
from orchestrator.plan import Draw


def _fail(number: int, kind: str = "worker") -> EpisodeFailed:
    return EpisodeFailed(kind, f"error {number}")


def test_half_of_a_hundred_may_fail_and_one_more_ends_the_run() -> None:
    rate = ErrorRate(0.5)
    for number in range(50):
        rate.record(_fail(number))
    with pytest.raises(
        EnvironmentFailure, match=r"51 of the last 51 episodes failed .1 timeout, 50 worker.*error 0$"
    ):
        rate.record(_fail(50, "timeout"))


def test_only_the_last_hundred_count_and_are_told_of() -> None:
    rate = ErrorRate(0.1)
    for number in range(1000):
        rate.record(_fail(number) if number % 10 == 0 else None)
    with pytest.raises(
        EnvironmentFailure, match=r"11 of the last 100 .*The first error of them was worker: error 910$"
    ):
        rate.record(_fail(1000))
        rate.record(_fail(1001))


def test_a_rate_of_zero_allows_no_failure_and_one_of_one_allows_all() -> None:
    with pytest.raises(EnvironmentFailure):
        ErrorRate(0.0).record(_fail(0))
    rate = ErrorRate(1.0)
    for number in range(500):
        rate.record(_fail(number))


def _group(outcome: Outcome) -> JudgedGroup:
    failure = _fail(7) if outcome == "failed" else None
    return JudgedGroup(Draw(0, 0, 0, 0), "a", outcome, (), (), None, failure)


def test_a_group_with_signal_begins_the_count_of_empty_ones_anew() -> None:
    rule = EmptyRule(RolloutConfig(groups_per_batch=3, max_empty_batches=2))
    for outcome in (["no_signal"] * 5 + ["signal"]) * 3:
        rule.record(_group(outcome))  # pyright: ignore[reportArgumentType]
    for _ in range(5):
        rule.record(_group("no_signal"))
    with pytest.raises(EnvironmentFailure, match=r"6 groups in a row.*in 5 all .* 1 had .*worker: error 7"):
        rule.record(_group("failed"))


def test_what_failed_before_a_group_with_signal_is_not_told_of() -> None:
    rule = EmptyRule(RolloutConfig(groups_per_batch=1, max_empty_batches=2))
    for outcome in ("failed", "signal", "no_signal"):
        rule.record(_group(outcome))
    with pytest.raises(EnvironmentFailure, match=r"0 had fewer than two episodes that did not fail\. "):
        rule.record(_group("no_signal"))
