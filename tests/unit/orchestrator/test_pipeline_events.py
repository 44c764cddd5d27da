"""What the loop makes of what does not come in step with batches: evaluations, outages, counts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.errors import ConfigError, EnvironmentFailure, PolicyServerError, PublishError
from contract.policy import Origin, VersionInfo
from contract.sections import SamplingConfig
from orchestrator.config import EvaluationConfig, RolloutConfig, SourceConfig
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.episode import Episode
from orchestrator.progress import Snapshot
from tests.support.rollouts import FakeRunner, FakeSource, FakeTrainer, Setup, coin, jitter, make_episode


class _SlowEvaluation(FakeRunner):
    """The evaluation of version 2 goes on until so many batches were sent, and the last version is served."""

    def __init__(self, trainer: FakeTrainer, num_batches: int, last_version: int) -> None:
        super().__init__(trainer, _by_version)
        self._outside = trainer
        self._num_batches = num_batches
        self._last_version = last_version

    async def run(self, source: Any, task: dict[str, Any], *, sampling: SamplingConfig, seed: int) -> Episode:
        episode = await super().run(source, task, sampling=sampling, seed=seed)
        trainer = self._outside
        while (
            task["source"] == "held"
            and episode.oldest_version >= 2
            and (len(trainer.batches) < self._num_batches or trainer.version < self._last_version)
        ):
            await asyncio.sleep(0.001)
        return episode


def _by_version(task: dict[str, Any], seed: int, version: int) -> Episode:
    return make_episode(float(version if task["source"] == "held" else seed), [version])


def _evaluated(folder: Path, max_steps: int) -> Setup:
    evaluation = EvaluationConfig(
        sources=[SourceConfig(environment="held-out", name="held")], interval=2, num_tasks=3
    )
    # The evaluation keeps its places while it waits.
    rollout = RolloutConfig(group_size=2, groups_per_batch=2, max_lead=1, max_concurrent=8)
    return Setup(folder, rollout, max_steps, evaluation=evaluation)


def test_an_evaluation_that_outlasts_the_batches_is_told_of_beside_the_final_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, setup = FakeTrainer(), _evaluated(tmp_path, 4)
    runner = _SlowEvaluation(trainer, 4, 4)
    with caplog.at_level(logging.INFO):
        asyncio.run(setup.run(trainer, runner))
    assert [batch.metrics.get("eval/version") for batch in trainer.batches] == [0.0, None, None, None]
    assert trainer.end.metrics["eval/version"] == 4.0 == trainer.end.metrics["eval/held/mean"]
    told = [record.getMessage() for record in caplog.records if "not among the metrics" in record.message]
    assert len(told) == 1 and "of version 2 is" in told[0] and "eval/held/mean 2," in told[0]


def _resumed(folder: Path, *, keep_trace: bool) -> tuple[FakeTrainer, Snapshot]:
    """A run that goes on after batch 5, up to which version 2 was being evaluated."""
    first, setup = FakeTrainer(), _evaluated(folder, 6)
    asyncio.run(setup.run(first, _SlowEvaluation(first, 5, 5)))
    if not keep_trace:
        (folder / "eval_version_2.jsonl").unlink()
    content = first.batches[4].snapshot
    again = FakeTrainer(5)
    asyncio.run(setup.run(again, FakeRunner(again, _by_version), content))
    return again, msgspec.json.decode(content, type=Snapshot)


def test_a_run_that_goes_on_reports_the_evaluation_that_no_batch_had(tmp_path: Path) -> None:
    again, state = _resumed(tmp_path, keep_trace=True)
    assert state.evaluated == 1
    (batch,) = again.batches
    assert batch.step == 6 and batch.metrics["eval/version"] == 2.0 == batch.metrics["eval/held/mean"]


def test_or_says_that_it_has_no_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    again, _ = _resumed(tmp_path, keep_trace=False)
    assert "eval/version" not in again.batches[0].metrics
    assert "evaluation of version 4, due when the run was stopped, has no result" in caplog.text


def test_a_group_that_failed_by_an_outage_is_sampled_again_once(tmp_path: Path) -> None:
    kinds = {1: "server", 2: "worker", 3: "environment"}
    calls: Counter[int] = Counter()

    def script(task: dict[str, Any], seed: int, version: int) -> Episode | EpisodeFailed:
        index = task["index"]
        calls[index] += 1
        # Task 1 comes through at the second time, task 2 never.
        if index in kinds and (index != 1 or calls[index] <= 2):
            return EpisodeFailed(kinds[index], "away")
        return make_episode(float(seed), [version])

    rollout = RolloutConfig(group_size=2, groups_per_batch=3, max_lead=0)
    setup = Setup(tmp_path, rollout, 3, sources=[FakeSource("a", 11)], weights=[1.0])
    trainer = FakeTrainer()
    asyncio.run(setup.run(trainer, FakeRunner(trainer, script)))
    # 9 groups are trained, of 11 tasks.
    assert calls == {index: 4 if index in (1, 2) else 2 for index in range(11)}
    texts = [(tmp_path / f"step_{step}.jsonl").read_text() for step in (1, 2, 3)]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    assert {row["task"]: row["attempt"] for row in rows} == {
        index: int(index == 1) for index in range(11) if index not in (2, 3)
    }

    def total(name: str) -> float:
        return sum(batch.metrics[name] for batch in trainer.batches)

    assert (total("groups/dropped_outage"), total("groups/dropped_failed")) == (2, 2)
    assert total("groups/dropped") == 4


def test_a_server_that_stays_away_ends_the_run_all_the_same(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=2, max_empty_batches=2, max_error_rate=1.0)
    trainer = FakeTrainer()
    runner = FakeRunner(trainer, lambda *_: EpisodeFailed("server", "away"))
    with pytest.raises(EnvironmentFailure, match="4 groups in a row"):
        asyncio.run(Setup(tmp_path, rollout, 3).run(trainer, runner))


def test_episodes_that_hang_are_ended_by_their_time_limit(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=4, groups_per_batch=2, max_lead=0, episode_timeout_seconds=0.1)
    trainer = FakeTrainer()
    runner = FakeRunner(trainer, delay=lambda task, seed: 3600.0 * (seed % 4 == 3))
    asyncio.run(Setup(tmp_path, rollout, 2).run(trainer, runner))
    assert sum(batch.metrics.get("episodes/failed/timeout", 0) for batch in trainer.batches) > 0


def test_counts_are_of_the_time_since_the_last_batch(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    runner = FakeRunner(trainer, coin)
    setup = Setup(tmp_path, RolloutConfig(group_size=2, groups_per_batch=2), 3)
    # 5 before the first, then one more with every batch.
    setup.counts = lambda: {"requests/retried": 5 + 10 * bool(runner.starts) + len(trainer.batches)}
    asyncio.run(setup.run(trainer, runner))
    assert [batch.metrics["requests/retried"] for batch in trainer.batches] == [10, 1, 1]


def test_no_lead_by_the_age_of_tokens_is_no_lead(tmp_path: Path) -> None:
    def run(folder: Path, timing: int) -> list[Any]:
        rollout = RolloutConfig(group_size=2, groups_per_batch=3, max_lead=2, max_off_policy_steps=0)
        setup = _evaluated(folder, 5)
        setup.rollout = rollout
        trainer = FakeTrainer(step_seconds=0.002)
        runner = FakeRunner(trainer, delay=jitter(timing))
        asyncio.run(setup.run(trainer, runner))
        evaluated = [batch.metrics.get("eval/held/mean") for batch in trainer.batches]
        return [[batch.samples for batch in trainer.batches], evaluated, runner.most_running]

    first = run(tmp_path / "a", 1)
    assert first == run(tmp_path / "b", 2)
    assert [value is None for value in first[1]] == [False, True, False, True, False] and first[2] <= 6


def test_so_it_is_with_one_that_began_after_the_batch_was_sent(tmp_path: Path) -> None:
    class Late(FakeTrainer):
        """Serves version 2 only when batch 3 was sent."""

        async def set_version(self, version: int) -> None:
            while version == 2 and len(self.batches) < 3:
                await asyncio.sleep(0.001)
            await super().set_version(version)

    first, setup = Late(), _evaluated(tmp_path, 6)
    asyncio.run(setup.run(first, FakeRunner(first, _by_version)))
    again = FakeTrainer(3)
    asyncio.run(setup.run(again, FakeRunner(again, _by_version), first.batches[2].snapshot))
    assert again.batches[0].metrics["eval/version"] == 2.0


class _LateTrainer(FakeTrainer):
    """Asks for its first batch `delay` looks after the start; until then the server has what was `left`."""

    def __init__(self, left: VersionInfo, delay: int) -> None:
        super().__init__()
        self.left = left
        self.looks_left = delay
        self.begins_at = Origin("run", "trainer")

    async def receiver(self) -> str | None:
        self.looks_left -= 1
        return None if self.looks_left >= 0 else "trainer"

    async def weights(self) -> dict[str, VersionInfo]:
        served = VersionInfo(self.version, self.begins_at)
        return {"http://fake": self.left if self.looks_left >= 0 else served}


@pytest.mark.parametrize(
    "left", [VersionInfo(0, Origin("run", "earlier")), VersionInfo(5, Origin("run", "earlier"))]
)
def test_nothing_is_sampled_from_what_an_earlier_attempt_has_left(left: VersionInfo, tmp_path: Path) -> None:
    trainer = _LateTrainer(left, delay=5)

    def script(task: dict[str, Any], seed: int, version: int) -> Episode:
        assert trainer.looks_left < 0, "the trainer has not come yet"
        return coin(task, seed, version)

    setup = Setup(tmp_path, RolloutConfig(group_size=2, groups_per_batch=2), max_steps=2)
    asyncio.run(setup.run(trainer, FakeRunner(trainer, script)))
    assert trainer.end.sequence == 3


def test_a_server_without_the_weights_of_the_trainer_ends_the_run(tmp_path: Path) -> None:
    trainer = _LateTrainer(VersionInfo(0, Origin("", "")), delay=0)
    setup = Setup(tmp_path, RolloutConfig(group_size=2, groups_per_batch=2), max_steps=2)
    for origin, run in ((Origin("other", "trainer"), "other"), (Origin("run", "earlier"), "run")):
        trainer.begins_at = origin
        with pytest.raises(PolicyServerError, match=f"does not have the weights of .* of run {run};"):
            asyncio.run(setup.run(trainer, FakeRunner(trainer)))


def test_a_server_that_is_too_short_for_the_samples_ends_the_run(tmp_path: Path) -> None:
    class Short(FakeTrainer):
        async def weights(self) -> dict[str, VersionInfo]:
            return {"http://short": VersionInfo(0, Origin("run", "trainer"), max_len=15)}

    setup = Setup(tmp_path, RolloutConfig(group_size=2), max_steps=2)
    trainer = Short()
    with pytest.raises(ConfigError, match=r"seq_len = 16, but .*short has max_len = 15"):
        asyncio.run(setup.run(trainer, FakeRunner(trainer)))


def test_traces_of_later_steps_go_once_the_trainer_begins_at_this_one_and_nothing_else(
    tmp_path: Path,
) -> None:
    setup = Setup(tmp_path, RolloutConfig(group_size=2, groups_per_batch=2), max_steps=1)
    setup.rollouts.mkdir(exist_ok=True)
    kept = {"eval_version_0.jsonl", "notes.txt"}
    names = kept | {"step_10.jsonl", "eval_version_4.jsonl", "step_3.jsonl.partial"}
    for name in names:
        (setup.rollouts / name).write_text("")
    further_on = _LateTrainer(VersionInfo(0, Origin("run", "trainer")), delay=0)
    further_on.version = 10
    with pytest.raises(PublishError, match="the trainer is at version 10"):
        asyncio.run(setup.run(further_on, FakeRunner(further_on)))
    assert {path.name for path in setup.rollouts.iterdir()} == names
    trainer = FakeTrainer()
    asyncio.run(setup.run(trainer, FakeRunner(trainer)))
    assert {path.name for path in setup.rollouts.iterdir()} == kept | {"step_1.jsonl"}


def test_a_trainer_that_does_not_come_ends_the_run(tmp_path: Path) -> None:
    trainer = _LateTrainer(VersionInfo(0, Origin("run", "trainer")), delay=10**6)
    setup = Setup(tmp_path, RolloutConfig(group_size=2), max_steps=2, version_seconds=0.1)
    with pytest.raises(PublishError, match=r"first request for a batch .* took longer than 0\.1 s"):
        asyncio.run(setup.run(trainer, FakeRunner(trainer)))
