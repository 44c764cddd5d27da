"""Held-out tasks: what is answered, what is counted, what is said."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from contract.errors import EnvironmentFailure, RunFolderError
from contract.sections import SamplingConfig
from orchestrator.config import EvaluationConfig, SourceConfig
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.episode import Episode
from orchestrator.evaluate import Evaluator, pass_at_k, print_comparison
from tests.support.rollouts import FakeRunner, FakeSource, FakeTrainer, make_episode


def _config(**values: Any) -> EvaluationConfig:
    return EvaluationConfig(sources=[SourceConfig(environment="x:held")], **values)


def _evaluator(
    config: EvaluationConfig,
    runner: FakeRunner,
    folder: Path,
    num_tasks: int = 50,
    timeout: float | None = None,
) -> Evaluator:
    return Evaluator(
        config,
        [FakeSource("held", num_tasks)],
        runner,
        sampling=SamplingConfig(temperature=0.7),
        seed=0,
        limiter=asyncio.Semaphore(4),
        rollouts=folder,
        episode_timeout_seconds=60.0 if timeout is None else timeout,
    )


@pytest.mark.parametrize("num_samples", [1, 3, 6])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_pass(num_samples: int) -> None:
    for passed in range(num_samples + 1):
        results = [True] * passed + [False] * (num_samples - passed)
        for k in range(1, num_samples + 1):
            choices = list(itertools.combinations(results, k))
            expected = sum(map(any, choices)) / len(choices)
            assert pass_at_k(num_samples, passed, k) == pytest.approx(expected)


def test_a_version_is_due_at_the_ends_and_every_interval() -> None:
    runner = FakeRunner(FakeTrainer())

    def due(config: EvaluationConfig) -> list[int]:
        evaluator = _evaluator(config, runner, Path())
        return [version for version in range(9) if evaluator.is_due(version, 8)]

    assert due(_config(interval=3)) == [0, 3, 6, 8]
    assert due(_config(interval=3, at_start=False)) == [3, 6, 8]
    assert due(_config()) == [0, 8]


def test_metrics_are_of_the_episodes_that_did_not_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Task 0: rewards 1, 0, 1, failed; task 1: all 0; task 2: all failed.
    script = {0: [1.0, 0.0, 1.0, None], 1: [0.0] * 4, 2: [None] * 4}
    calls: dict[int, int] = {}

    def answer(task: dict[str, Any], seed: int, version: int) -> Episode | EpisodeFailed:
        number = calls[task["index"]] = calls.get(task["index"], -1) + 1
        reward = script[task["index"]][number]
        if reward is None:
            return EpisodeFailed("timeout", "too slow")
        return make_episode(reward, [7, 7], truncated=reward == 0.0)

    evaluator = _evaluator(
        _config(num_tasks=9, num_samples=4), FakeRunner(FakeTrainer(), answer), tmp_path, 3
    )
    with caplog.at_level(logging.INFO):
        metrics = asyncio.run(evaluator.run(7))
    assert metrics == {
        "eval/held/mean": pytest.approx(2 / 7),
        "eval/held/length": 2.0,
        "eval/held/truncated": pytest.approx(5 / 7),
        "eval/held/failed": 5.0,
        "eval/held/pass@1": pytest.approx((2 / 3 + 0) / 2),
        "eval/held/pass@2": pytest.approx((1 + 0) / 2),
        "eval/held/pass@4": 0.0,  # only task 1 has four
    }
    assert "5 of 12 episodes failed and are left out; the first: timeout: too slow" in caplog.text
    rows = [json.loads(line) for line in (tmp_path / "eval_version_7.jsonl").read_text().splitlines()]
    assert [(row["task"], row["sample"]) for row in rows] == [(t, s) for t in range(3) for s in range(4)]
    assert rows[3]["failed"] == "timeout" and rows[0]["versions"] == [7, 7]


def test_episodes_of_the_evaluation_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluator = _evaluator(_config(num_tasks=3, num_printed=1), FakeRunner(FakeTrainer()), tmp_path)
    asyncio.run(evaluator.run(0))
    shown = capsys.readouterr().out
    assert "episodes of version 0" in shown and shown.count("question") == 1 and "answer" in shown


def test_two_evaluations_draw_with_the_same_seeds_and_none_of_training(tmp_path: Path) -> None:
    runner = FakeRunner(FakeTrainer())
    evaluator = _evaluator(_config(num_tasks=3, num_samples=2), runner, tmp_path)
    asyncio.run(evaluator.run(0))
    asyncio.run(evaluator.run(9))
    seeds = [seed for _, seed, _ in runner.starts]
    assert seeds[:6] == seeds[6:] and len(set(seeds)) == 6


def test_an_evaluation_of_which_nothing_could_be_finished_is_an_error(tmp_path: Path) -> None:
    runner = FakeRunner(FakeTrainer(), lambda *_: EpisodeFailed("environment", "no such file"))
    evaluator = _evaluator(_config(num_tasks=2), runner, tmp_path)
    with pytest.raises(EnvironmentFailure, match=r"all 2 episodes .*'held' failed.*no such file"):
        asyncio.run(evaluator.run(0))


def test_before_and_after_stand_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"eval/held/mean": 0.125, "eval/held/failed": 0.0}
    print_comparison(before, {"eval/held/mean": 0.75, "eval/held/failed": 0.0, "eval/version": 40.0})
    words = capsys.readouterr().out.split()
    assert words[-3:] == ["held/mean", "0.125", "0.75"] and "held/failed" not in words
    print_comparison({}, {"eval/held/mean": 0.75})
    assert capsys.readouterr().out == ""


def test_an_episode_that_takes_too_long_is_left_out(tmp_path: Path) -> None:
    runner = FakeRunner(FakeTrainer(), delay=lambda task, seed: 3600.0 * (task["index"] == 1))
    evaluator = _evaluator(_config(num_tasks=3), runner, tmp_path, timeout=0.2)
    metrics = asyncio.run(asyncio.wait_for(evaluator.run(0), 30))
    assert metrics["eval/held/failed"] == 1.0


def test_a_finished_evaluation_is_recalled_from_its_trace(tmp_path: Path) -> None:
    def answer(task: dict[str, Any], seed: int, version: int) -> Episode | EpisodeFailed:
        if task["index"] == 2:
            return EpisodeFailed("environment", "no")
        return make_episode(float(seed % 2), [version] * (1 + seed % 5))

    config = _config(num_tasks=6, num_samples=3)
    metrics = asyncio.run(_evaluator(config, FakeRunner(FakeTrainer(), answer), tmp_path).run(4))
    evaluator = _evaluator(config, FakeRunner(FakeTrainer()), tmp_path)
    assert evaluator.recall(4) == metrics
    assert evaluator.recall(5) == {}
    # Of a source that has nothing there: the sources may have changed, or all of it failed.
    (tmp_path / "eval_version_6.jsonl").write_text(
        '{"source": "other", "task": 0, "reward": 1.0, "num_tokens": 3}\n'
        '{"source": "held", "task": 0, "failed": "timeout", "error": "too slow"}\n'
    )
    assert evaluator.recall(6) == {}
    (tmp_path / "eval_version_7.jsonl").write_text("no JSON")
    with pytest.raises(RunFolderError, match=r"cannot read the trace .*eval_version_7\.jsonl"):
        evaluator.recall(7)
