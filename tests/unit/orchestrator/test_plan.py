"""The order of tasks: a function of sources, weights and seed."""

from __future__ import annotations

from collections import Counter

import pytest

from orchestrator.plan import Draw, Plan, PlannedSource

SOURCES = (PlannedSource("a", 5.0, 7), PlannedSource("b", 1.0, 4), PlannedSource("c", 2.5, 11))


def _draws(plan: Plan, count: int) -> list[Draw]:
    return [plan.draw() for _ in range(count)]


def test_the_order_is_that_of_the_seed() -> None:
    first = _draws(Plan(SOURCES, 3), 200)
    assert first == _draws(Plan(SOURCES, 3), 200)
    assert first != _draws(Plan(SOURCES, 4), 200)
    assert [draw.position for draw in first] == list(range(200))


def test_sources_take_turns_by_smooth_weighted_round_robin() -> None:
    # The textbook form: add every weight, take the greatest, take the sum of weights off it.
    weights = [source.weight for source in SOURCES]
    current = [0.0, 0.0, 0.0]
    expected = []
    for _ in range(500):
        current = [have + weight for have, weight in zip(current, weights, strict=True)]
        taken = current.index(max(current))
        current[taken] -= sum(weights)
        expected.append(taken)
    assert [draw.source for draw in _draws(Plan(SOURCES, 0), 500)] == expected


def test_every_epoch_of_a_source_has_each_of_its_tasks_once_in_a_new_order() -> None:
    draws = [draw for draw in _draws(Plan(SOURCES, 1), 400) if draw.source == 2]
    epochs = [[draw.task for draw in draws if draw.epoch == epoch] for epoch in range(8)]
    assert all(sorted(tasks) == list(range(11)) for tasks in epochs)
    assert len({tuple(tasks) for tasks in epochs}) == 8


def test_sources_of_equal_size_are_not_in_the_same_order() -> None:
    plan = Plan([PlannedSource("a", 1, 20), PlannedSource("b", 1, 20)], 0)
    draws = _draws(plan, 40)
    assert [d.task for d in draws if d.source == 0] != [d.task for d in draws if d.source == 1]


@pytest.mark.parametrize("taken", [0, 1, 17, 93, 400])
def test_a_plan_goes_on_from_its_counts(taken: int) -> None:
    plan = Plan(SOURCES, 5)
    _draws(plan, taken)
    resumed = Plan(SOURCES, 5, plan.counts)
    assert resumed.position == taken
    assert _draws(resumed, 60) == _draws(plan, 60)


def test_shares_never_stray_from_the_weights_by_more_than_a_task() -> None:
    taken = Counter[int]()
    for draw in _draws(Plan(SOURCES, 0), 2000):
        taken[draw.source] += 1
        for source, planned in enumerate(SOURCES):
            assert abs(taken[source] - (draw.position + 1) * planned.weight / 8.5) < 1.5
