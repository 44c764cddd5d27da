"""One rank fails: the others end, and what the user sees first is the cause."""

from __future__ import annotations

import sys
import time

from tests.integration.place import Place, trained
from tests.support.runs import Command


def test_a_rank_that_raises_ends_the_run_with_its_exit_code_and_its_traceback_first(place: Place) -> None:
    assert place.run("sft", "--dry-run", max_steps=50).code == 0
    config, attempt = place.folder().config / "sft.toml", place.folder().logs / "attempt_1"
    attempt.mkdir(parents=True)
    words = [sys.executable, "-m", "tests.integration.entries", "launch", "failing", config, attempt]
    started = time.monotonic()
    finished = Command(words, place.nursery.environment, place.root).wait(120)

    assert finished.code == 1
    assert time.monotonic() - started < 100  # rank 0 waits for rank 1 in a collective, which has 600 s
    assert "rank 1 ended first, with exit code 1: rank 1 cannot read its rows" in finished.output
    assert "in next_step" in finished.output
    errors = [line for line in finished.output.splitlines() if "Error" in line]
    assert "ZeroDivisionError" in errors[0]
    assert list(trained(place.metrics())) == [1]
