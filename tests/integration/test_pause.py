"""A run that is asked to pause, to save now, or that reaches its time limit; and that it goes on as if it had
not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contract import control
from contract.errors import EXIT_PAUSED
from launcher import ckpt_run
from tests.integration.place import Place, assert_same_tensors, trained
from tests.support.runs import wait_until

ENDLESS: dict[str, Any] = {"max_steps": 1_000_000}


def _has_step(place: Place, step: int, name: str = "sft") -> bool:
    return place.folder(name).metrics.exists() and step in trained(place.metrics(name))


def _ckpt(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The true command."""
    program = Path(sys.executable).with_name("ckpt")
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=120)


def _last_step(place: Place) -> int:
    """The step that the run came to; it must be the only one committed, and marked."""
    (step,) = place.committed()
    assert list(trained(place.metrics())) == list(range(1, step + 1))
    mark = control.read_paused(place.folder())
    assert mark is not None and (mark.step, mark.saved) == (step, True)
    return step


def _assert_goes_on_as_if_never_paused(place: Place, step: int, **options: Any) -> None:
    place.train("sft", "--resume", max_steps=step + 1, **options)
    assert list(trained(place.metrics())) == list(range(1, step + 2))
    assert control.read_paused(place.folder()) is None
    place.train("whole", max_steps=step + 1, **options)
    assert_same_tensors(place.checkpoint("sft", step + 1), place.checkpoint("whole", step + 1))


def test_ckpt_pause_saves_the_step_waits_for_the_end_and_resume_goes_on(place: Place) -> None:
    (rank,) = place.start(**ENDLESS)
    wait_until(lambda: _has_step(place, 3), "the third step")
    asked = _ckpt("pause", place.folder().root)
    finished = rank.wait(60)

    assert asked.returncode == 0, asked.stderr
    assert finished.code == EXIT_PAUSED, finished.output
    step = _last_step(place)
    assert f"paused at step {step}, which is saved" in asked.stdout
    assert "saved; go on with --resume" in finished.output
    assert [path.name for path in place.folder().control.iterdir()] == ["pause.answer"]
    _assert_goes_on_as_if_never_paused(place, step)
    assert list(place.folder().control.iterdir()) == []


@pytest.mark.parametrize("rank_asked", [0, 1])
def test_sigusr1_to_one_rank_pauses_all(place: Place, rank_asked: int) -> None:
    ranks = place.start(world_size=2, **ENDLESS)
    wait_until(lambda: _has_step(place, 3), "the third step")
    ranks[rank_asked].send(signal.SIGUSR1)
    finished = [rank.wait(60) for rank in ranks]

    assert [item.code for item in finished] == [EXIT_PAUSED] * 2, finished[0].output
    step = _last_step(place)
    if rank_asked == 1:
        _assert_goes_on_as_if_never_paused(place, step, world_size=2)


def test_sigusr1_to_the_launcher_of_two_processes_pauses_the_run(place: Place) -> None:
    command = place.command(deployment__num_processes=2, **ENDLESS)
    wait_until(lambda: _has_step(place, 2), "the second step")
    command.process.send_signal(signal.SIGUSR1)
    finished = command.wait(60)

    assert finished.code == EXIT_PAUSED, finished.output
    assert "the run is paused; go on with --resume" in finished.output
    assert "Traceback" not in finished.output and "ended first" not in finished.output
    _last_step(place)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_sigusr1_during_start_up_pauses_before_the_first_step(place: Place, num_processes: int) -> None:
    command = place.command(deployment__num_processes=num_processes, **ENDLESS)
    name = "sft.toml" if num_processes == 1 else "rank_1.pid"
    wait_until((place.folder().logs / "latest" / name).exists, f"{name} of the attempt")
    for pid in [command.process.pid, *command.descendants()]:
        # Also to processes that have nothing to do with it: none may be ended by it.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    finished = command.wait(120)

    assert finished.code == EXIT_PAUSED, finished.output
    assert "nothing was trained in this attempt; go on with --resume" in finished.output
    assert (place.committed(), trained(place.metrics())) == ([], {})
    mark = control.read_paused(place.folder())
    assert mark is not None and (mark.step, mark.reason, mark.saved) == (0, "SIGUSR1", False)
    place.train("sft", "--resume", max_steps=1, world_size=num_processes)
    assert place.committed() == [1]


def test_save_now_saves_one_step_more_and_the_run_goes_on(place: Place) -> None:
    (rank,) = place.start(**ENDLESS)
    wait_until(lambda: _has_step(place, 2), "the second step")
    asked = _ckpt("save-now", place.folder().root)
    assert asked.returncode == 0, asked.stderr
    wait_until(lambda: place.committed() != [], "the save")
    (step,) = place.committed()
    assert f"the run saves step {step} and goes on" in asked.stdout
    wait_until(lambda: _has_step(place, step + 2), "two steps more")
    rank.send(signal.SIGTERM)
    finished = rank.wait(30)

    assert finished.code == 143, finished.output
    assert place.committed()[0] == step and len(place.committed()) == 2
    place.train("copy", "--resume.dir", str(place.checkpoint("sft", step)), max_steps=step + 1)
    assert list(trained(place.metrics("copy"))) == [step + 1]


def test_a_request_to_save_before_the_first_step_gives_a_checkpoint_that_can_be_resumed(place: Place) -> None:
    (rank,) = place.start(max_steps=2)
    log = place.folder().logs / "latest" / "trainer_0.log"
    wait_until(log.exists, "the start")
    control.ask(place.folder(), "save-now")
    assert rank.wait(60).code == 0
    first, *_, last = place.committed()
    assert last == 2 and first < 2
    place.train("copy", "--resume.dir", str(place.checkpoint("sft", first)), max_steps=2)
    assert_same_tensors(place.checkpoint("sft", 2), place.checkpoint("copy", 2))


def test_a_pause_waits_for_the_end_of_a_validation_whose_loss_it_keeps(place: Place) -> None:
    settings: dict[str, Any] = {
        "validation__path": place.shared / "train.jsonl",
        "validation__interval": 1,
        "validation__at_start": False,
    }
    (rank,) = place.start(**settings, **ENDLESS)
    wait_until(lambda: _has_step(place, 2), "the second step")
    control.ask(place.folder(), "pause")
    assert rank.wait(30).code == EXIT_PAUSED
    step = _last_step(place)
    assert all("validation/loss" in place.metrics()[number] for number in range(1, step + 1))


def test_a_run_pauses_after_the_step_in_which_its_time_limit_passes(place: Place) -> None:
    finished = place.run(max_minutes=0.1, **ENDLESS)
    assert finished.code == EXIT_PAUSED, finished.output
    step = _last_step(place)
    assert f"max_minutes = 0.1: the run pauses after step {step}" in finished.output
    place.train("sft", "--resume", max_steps=step + 1)
    assert list(trained(place.metrics())) == list(range(1, step + 2))


def test_without_checkpoints_a_pause_is_refused_and_the_time_limit_is_not(place: Place) -> None:
    (rank,) = place.start(ckpt=None, max_minutes=0.2, **ENDLESS)
    wait_until(lambda: _has_step(place, 1), "the first step")
    asked = _ckpt("pause", place.folder().root)
    assert asked.returncode == 1
    assert "refused: the run saves no checkpoints (--no-ckpt), so it goes on" in asked.stderr
    rank.send(signal.SIGUSR1)
    refusal = "a pause was asked for, but the run saves no checkpoints"
    wait_until(lambda: rank.output.count(refusal) == 2, "the second refusal")
    finished = rank.wait(60)

    assert finished.code == EXIT_PAUSED, finished.output
    assert "by max_minutes = 0.2; nothing was saved (--no-ckpt)" in finished.output
    assert place.committed() == []


def test_what_was_asked_of_an_earlier_attempt_does_not_reach_the_next(place: Place) -> None:
    place.train(max_steps=1)
    control.ask(place.folder(), "pause")
    control.ask(place.folder(), "save-now")
    place.train("sft", "--resume", max_steps=3)
    assert place.committed() == [1, 3]


def test_a_pause_of_a_run_that_is_not_going_on_is_refused_and_leaves_nothing(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.train(max_steps=1)
    for words in (["pause"], ["save-now", "--no-wait"]):
        assert ckpt_run.run([*words, str(place.folder().root)]) == 2
        assert "no run is going on" in capsys.readouterr().err
    assert not place.folder().control.exists()


def test_a_pause_of_a_run_that_ends_first_is_told_and_taken_back(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    (rank,) = place.start(sample__prompts=["abc"] * 200, sample__max_new_tokens=200, max_steps=1)
    wait_until(lambda: "memory (estimate)" in rank.output, "the summary")
    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(ckpt_run.run(["pause", str(place.folder().root)])))
    waiting.start()
    wait_until(lambda: control.is_asked(place.folder(), "pause"), "the request")
    rank.send(signal.SIGKILL)
    waiting.join(30)
    assert codes == [1]
    assert "ended before it took the request" in capsys.readouterr().err
    assert not any(place.folder().control.iterdir())
