"""A signal ends a run in order: one whole checkpoint at the step it had reached, the signal's exit code."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

import pytest

from contract.errors import EXIT_PAUSED
from tests.integration.place import Place, assert_same_tensors, conversation, trained, write_jsonl
from tests.support.runs import Command, wait_until

ENDLESS: dict[str, Any] = {"max_steps": 1_000_000}


def _has_step(place: Place, step: int, name: str = "sft") -> bool:
    return place.folder(name).metrics.exists() and step in trained(place.metrics(name))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_step_saves_that_step_and_resume_goes_on_with_the_next(
    place: Place, signum: int, code: int
) -> None:
    (rank,) = place.start(**ENDLESS)
    wait_until(lambda: _has_step(place, 3), "the third step")
    rank.send(signum)
    finished = rank.wait(30)

    assert finished.code == code, finished.output
    assert "saved; go on with --resume" in finished.output
    (step,) = place.committed()
    assert list(trained(place.metrics())) == list(range(1, step + 1))

    place.train("sft", "--resume", max_steps=step + 1)
    assert list(trained(place.metrics())) == list(range(1, step + 2))
    place.train("whole", max_steps=step + 1)
    assert_same_tensors(place.checkpoint("sft", step + 1), place.checkpoint("whole", step + 1))


def test_sigterm_to_the_launcher_of_two_processes_saves_once_and_ends_all_of_them(place: Place) -> None:
    command = place.command(deployment__num_processes=2, **ENDLESS)
    wait_until(lambda: _has_step(place, 3), "the third step")
    command.process.send_signal(signal.SIGTERM)
    finished = command.wait(60)

    assert finished.code == 143, finished.output
    assert "Traceback" not in finished.output
    (step,) = place.committed()
    place.train("sft", "--resume", max_steps=step + 1, world_size=2)
    assert list(trained(place.metrics())) == list(range(1, step + 2))


@pytest.mark.parametrize(
    ("offload", "signum", "code"),
    [
        ("optimizer", signal.SIGTERM, 143),
        ("full", signal.SIGTERM, 143),
        ("optimizer", signal.SIGUSR1, EXIT_PAUSED),
    ],
)
def test_an_end_or_a_pause_while_a_save_is_in_flight_finishes_it_and_saves_the_step(
    place: Place, offload: str, signum: int, code: int
) -> None:
    settings: dict[str, Any] = {"model__offload": offload, "ckpt__async_save": True}
    place.train("sft", "--dry-run", ckpt__interval=3, **settings, **ENDLESS)
    config, attempt = place.folder().config / "sft.toml", place.folder().logs / "attempt_1"
    attempt.mkdir(parents=True)
    words = [sys.executable, "-m", "tests.integration.entries", "launch", "slow", config, attempt]
    command = Command(words, place.nursery.environment, place.root)
    partial = place.folder().checkpoints / "step_3.partial"
    wait_until(partial.exists, "the save of step 3")
    wait_until(lambda: _has_step(place, 4), "the step after it")
    assert partial.exists(), "the save ended too early to be in flight"
    command.process.send_signal(signum)
    finished = command.wait(60)  # which sees that no process is left

    assert finished.code == code, finished.output
    assert "Traceback" not in finished.output
    first, last = place.committed()
    assert (first, last) == (3, max(trained(place.metrics())))
    records = map(json.loads, place.folder().metrics.read_text().splitlines())
    assert [item["checkpoint/step"] for item in records if "checkpoint/step" in item] == [first, last]
    place.train("sft", "--resume", max_steps=last + 1, world_size=2, **settings)
    assert list(trained(place.metrics())) == list(range(1, last + 2))
    place.train("whole", max_steps=last + 1, world_size=2, model__offload=offload)
    assert_same_tensors(place.checkpoint("sft", last + 1), place.checkpoint("whole", last + 1))


def test_a_signal_during_validation_does_not_wait_for_its_end(place: Place) -> None:
    rows = write_jsonl(place.root / "long.jsonl", [conversation("ab", "ba")] * 20_000)
    (rank,) = place.start(
        validation__path=rows,
        validation__interval=2,
        validation__at_start=False,
        validation__max_rows=20_000,
        data__packing=False,
        **ENDLESS,
    )
    wait_until(lambda: _has_step(place, 2), "the second step")
    time.sleep(0.3)  # into the validation
    rank.send(signal.SIGTERM)
    finished = rank.wait(20)

    assert finished.code == 143, finished.output
    assert place.committed() == [2]
    assert "validation/loss" not in place.metrics()[2]


def test_a_signal_during_the_samples_before_training_ends_the_run_without_a_step(place: Place) -> None:
    (rank,) = place.start(sample__prompts=["abc"] * 40, sample__max_new_tokens=100, **ENDLESS)
    wait_until(lambda: "memory (estimate)" in rank.output, "the summary")
    rank.send(signal.SIGTERM)
    finished = rank.wait(60)

    assert finished.code == 143, finished.output
    assert place.committed() == []
    assert trained(place.metrics()) == {}


def test_a_second_signal_ends_the_run_at_once(place: Place) -> None:
    prompts = ["abc"] * 2_000
    (rank,) = place.start(sample__prompts=prompts, sample__max_new_tokens=200, **ENDLESS)
    wait_until(lambda: "memory (estimate)" in rank.output, "the summary")
    time.sleep(0.3)  # into the samples, which no signal cuts short
    rank.send(signal.SIGINT)
    wait_until(lambda: "a second signal ends the run at once" in rank.output, "the warning")
    rank.send(signal.SIGINT)
    sent = time.monotonic()
    assert rank.wait(20).code == 130
    assert time.monotonic() - sent < 10


def test_a_signal_while_rows_are_read_ends_the_run_with_one_message(place: Place) -> None:
    rows = write_jsonl(place.root / "many.jsonl", [conversation("abcdefg", "ba")] * 200_000)
    (rank,) = place.start(data__path=rows, **ENDLESS)
    wait_until(lambda: (place.folder().logs / "latest" / "trainer_0.log").exists(), "the log")
    time.sleep(0.5)
    rank.send(signal.SIGTERM)
    finished = rank.wait(20)

    assert finished.code == 143, finished.output
    assert "ended by SIGTERM before training began" in finished.output
    assert "Traceback" not in finished.output
    assert not place.folder().holds_run()


@pytest.mark.parametrize("seconds", [1.0, 2.5])
def test_ctrl_c_while_the_command_imports_its_libraries_shows_no_traceback(
    place: Place, seconds: float
) -> None:
    command = place.command(**ENDLESS)
    time.sleep(seconds)
    command.process.send_signal(signal.SIGINT)
    finished = command.wait(60)

    assert finished.code == 130, finished.output
    assert "Traceback" not in finished.output


def test_ctrl_c_while_two_processes_import_their_libraries_shows_no_traceback(place: Place) -> None:
    command = place.command(deployment__num_processes=2, **ENDLESS)
    pid_files = [place.folder().logs / "latest" / f"rank_{rank}.pid" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in pid_files), "the start of both ranks")
    time.sleep(0.7)
    command.process.send_signal(signal.SIGINT)
    finished = command.wait(60)

    assert finished.code == 130, finished.output
    assert "Traceback" not in finished.output
    assert not place.folder().holds_run()
