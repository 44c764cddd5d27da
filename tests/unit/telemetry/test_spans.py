"""Time per part of a step, and the speed of the run."""

from __future__ import annotations

import pytest

from telemetry.spans import Spans, Throughput


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_of_one_name_add_up_and_the_step_counts_all_time() -> None:
    clock = _Clock()
    spans = Spans(clock=clock)
    for _ in range(2):
        with spans.span("forward"):
            clock.now += 1.0
            with spans.span("gather"):
                clock.now += 0.25
        clock.now += 0.5
    assert spans.collect() == {"time/forward": 2.5, "time/gather": 0.5, "step_seconds": 3.5}


def test_each_step_starts_from_nothing() -> None:
    clock = _Clock()
    spans = Spans(clock=clock)
    with spans.span("forward"):
        clock.now += 1.0
    spans.collect()
    clock.now += 2.0
    assert spans.collect() == {"step_seconds": 2.0}
    clock.now += 5.0
    spans.restart()
    clock.now += 1.0
    assert spans.collect() == {"step_seconds": 1.0}


def test_a_span_that_raises_is_counted() -> None:
    clock = _Clock()
    spans = Spans(clock=clock)
    with pytest.raises(KeyError), spans.span("forward"):
        clock.now += 1.0
        raise KeyError
    assert spans.collect()["time/forward"] == 1.0


def test_speed_and_time_left_are_medians_that_forget_the_first_step() -> None:
    throughput = Throughput(window=3)
    first = throughput.update(num_tokens=100, seconds=50.0, steps_left=9)
    assert first == {"tokens_per_second": 2.0, "eta_seconds": 450.0}
    assert throughput.update(num_tokens=100, seconds=1.0, steps_left=8)["tokens_per_second"] == 100.0
    throughput.update(num_tokens=200, seconds=2.0, steps_left=7)
    slow = throughput.update(num_tokens=100, seconds=30.0, steps_left=6)
    assert slow == {"tokens_per_second": 100.0, "eta_seconds": 12.0}


def test_without_a_known_end_no_time_left_is_given() -> None:
    assert Throughput().update(num_tokens=10, seconds=1.0, steps_left=None) == {"tokens_per_second": 10.0}
