"""Whole runs between fakes: order, lead, age, resume, and the end."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.errors import ChannelError, EnvironmentFailure, PolicyServerError, PublishError
from contract.rollout import RolloutBatch, from_wire
from orchestrator.config import EvaluationConfig, RolloutConfig, SourceConfig
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.episode import Episode
from orchestrator.progress import Snapshot
from tests.support.rollouts import FakeRunner, FakeSource, FakeTrainer, Setup, coin, jitter, make_episode


def _trace(folder: Path, steps: int) -> list[dict[str, Any]]:
    texts = [(folder / f"step_{step}.jsonl").read_text() for step in range(1, steps + 1)]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _positions(batches: list[RolloutBatch], group_size: int) -> list[int]:
    """Groups that were trained, by the ids of their samples."""
    return [
        position
        for batch in batches
        for position in sorted({sample.sample_id // group_size for sample in batch.samples})
    ]


def _state(batch: RolloutBatch) -> Snapshot:
    return msgspec.json.decode(batch.snapshot, type=Snapshot)


def _with_evaluation() -> EvaluationConfig:
    return EvaluationConfig(
        sources=[SourceConfig(environment="held-out", name="held")], interval=2, num_tasks=5, num_samples=2
    )


def _synchronous_run(folder: Path, timing: int) -> list[dict[str, Any]]:
    rollout = RolloutConfig(group_size=3, groups_per_batch=4, max_lead=0, max_concurrent=5)
    setup = Setup(folder, rollout, max_steps=6, evaluation=_with_evaluation())
    trainer = FakeTrainer(step_seconds=0.003)
    asyncio.run(setup.run(trainer, FakeRunner(trainer, delay=jitter(timing))))
    messages = [msgspec.to_builtins(message) for message in trainer.messages]
    for message in messages:
        for name in [name for name in message["metrics"] if name.startswith(("time/", "rate/"))]:
            del message["metrics"][name]
    return messages


def test_without_a_lead_two_runs_of_one_seed_are_the_same_but_for_times(tmp_path: Path) -> None:
    first, second = _synchronous_run(tmp_path / "a", 1), _synchronous_run(tmp_path / "b", 2)
    assert len(first) == 7 and first[0]["metrics"]["groups/dropped_no_signal"] > 0
    assert first == second
    assert _trace(tmp_path / "a", 6) == _trace(tmp_path / "b", 6)


def test_without_a_lead_every_token_is_of_the_version_that_is_trained(tmp_path: Path) -> None:
    for message in _synchronous_run(tmp_path, 3)[:-1]:
        assert message["oldest_version"] == message["newest_version"] == message["step"] - 1
        assert message["metrics"]["staleness/max"] == 0


def test_a_batch_has_the_first_groups_with_signal_in_the_order_of_the_plan(tmp_path: Path) -> None:
    messages = _synchronous_run(tmp_path, 4)
    rows = _trace(tmp_path, 6)
    positions = sorted({row["position"] for row in rows})
    assert len(positions) == 6 * 4
    # The seeds are those that an uninterrupted reading of the plan would give, whatever finished first.
    dropped = sum(message["metrics"]["groups/dropped_no_signal"] for message in messages[:-1])
    assert max(positions) + 1 == len(positions) + dropped


def test_sampling_runs_ahead_by_the_lead_and_no_further(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=3, max_lead=2)
    trainer = FakeTrainer(step_seconds=0.02)
    setup = Setup(tmp_path, rollout, max_steps=8, sources=[FakeSource("a", 1000)], weights=[1])

    def learnable(task: dict[str, Any], seed: int, version: int) -> Episode:
        return make_episode(float(seed), [version])

    runner = FakeRunner(trainer, learnable)
    asyncio.run(setup.run(trainer, runner))
    started: Counter[int] = Counter()
    ahead = []
    for _, _, version in runner.starts:
        started[version] += 1
        ahead.append(sum(started.values()) - (version + 1) * rollout.batch_size)
    # Nothing is dropped here, so the k-th episode is one of batch k / batch_size.
    assert max(ahead) == rollout.max_lead * rollout.batch_size
    assert sum(started.values()) == 8 * rollout.batch_size


def test_no_trained_token_is_too_old_when_the_server_lags_and_what_is_dropped_is_counted(
    tmp_path: Path,
) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=2, max_lead=2, max_off_policy_steps=2)
    trainer = FakeTrainer(step_seconds=0.002)
    chance = random.Random(0)

    def delay(task: dict[str, Any], seed: int) -> float:
        return 0.15 if chance.random() < 0.1 else 0.001

    runner = FakeRunner(trainer, lambda task, seed, version: make_episode(float(seed), [version]), delay)
    setup = Setup(tmp_path, rollout, max_steps=60)
    asyncio.run(setup.run(trainer, runner))
    rows = _trace(tmp_path, 60)
    assert {row["step"] - 1 - row["versions"][0] for row in rows} == {0, 1, 2}
    given_up = sum(batch.metrics["groups/dropped_stale"] for batch in trainer.batches)
    attempts = {row["position"]: row["attempt"] for row in rows}
    waiting = sum(draw.attempt for draw in _state(trainer.batches[-1]).outstanding)
    assert given_up == sum(attempts.values()) + waiting > 0
    assert runner.num_cancelled > 0


def test_groups_that_age_while_they_wait_for_a_batch_are_swept_out(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=2, max_lead=1, max_off_policy_steps=1)
    trainer = FakeTrainer(trains=False)

    def old(task: dict[str, Any], seed: int, version: int) -> Episode:
        # A server that lags: the first batches' groups say that they are older than the server is.
        lag = 1 if version >= 2 and seed % 3 == 0 else 0
        return make_episode(float(seed), [version - lag])

    async def drive() -> None:
        pipeline = setup.make(trainer, FakeRunner(trainer, old))
        running = asyncio.ensure_future(pipeline.run())
        for version in range(1, 12):
            while len(trainer.batches) < min(version + 1, 12):
                await asyncio.sleep(0.001)
            await trainer.set_version(version)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    setup = Setup(tmp_path, rollout, max_steps=12)
    asyncio.run(asyncio.wait_for(drive(), 30))
    rows = _trace(tmp_path, 12)
    assert max(row["step"] - 1 - row["versions"][0] for row in rows) == 1
    swept = sum(batch.metrics["groups/dropped_stale"] for batch in trainer.batches)
    wasted = sum(batch.metrics["rollout/wasted_tokens"] for batch in trainer.batches)
    assert swept > 0 and wasted == 2 * swept  # one token an episode


def test_no_more_episodes_run_at_a_time_than_allowed(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=4, groups_per_batch=4, max_lead=1, max_concurrent=6)
    trainer = FakeTrainer()
    runner = FakeRunner(trainer, delay=jitter(0))
    asyncio.run(Setup(tmp_path, rollout, max_steps=4).run(trainer, runner))
    assert runner.most_running == 6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_lead", [0, 2])
def test_after_any_crash_every_task_is_trained_once(seed: int, max_lead: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    rollout = RolloutConfig(group_size=2, groups_per_batch=3, max_lead=max_lead, max_off_policy_steps=2)
    setup = Setup(tmp_path, rollout, max_steps=15)
    kept: list[RolloutBatch] = []
    while len(kept) < setup.max_steps:
        trainer = FakeTrainer(len(kept), step_seconds=0.001)
        runner = FakeRunner(trainer, delay=jitter(chance.randrange(1000), most=0.006))

        async def cut_short(trainer: FakeTrainer, runner: FakeRunner, snapshot: bytes | None) -> None:
            try:
                async with asyncio.timeout(chance.uniform(0.01, 0.12)):
                    await setup.run(trainer, runner, snapshot)
            except TimeoutError:
                pass

        asyncio.run(cut_short(trainer, runner, kept[-1].snapshot if kept else None))
        # The checkpoint may be that of any update that was done; all later ones are lost.
        done = trainer.version - len(kept)
        kept += trainer.batches[: chance.randint(0, done) if len(kept) + done < setup.max_steps else done]
    trained = _positions(kept, rollout.group_size)
    assert len(trained) == len(set(trained)) == 15 * rollout.groups_per_batch
    state = _state(kept[-1])
    outstanding = {draw.position for draw in state.outstanding}
    dropped = set(range(sum(state.counts))) - outstanding - set(trained)
    assert not outstanding & set(trained)
    # What is neither trained nor waiting was sampled, had no signal, and was counted.
    assert len(dropped) == sum(batch.metrics["groups/dropped_no_signal"] for batch in kept) > 0


def test_a_run_without_a_lead_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=3, max_lead=0)
    whole, setup = FakeTrainer(), Setup(tmp_path, rollout, max_steps=8)
    asyncio.run(setup.run(whole, FakeRunner(whole)))
    rest = FakeTrainer(3)
    asyncio.run(setup.run(rest, FakeRunner(rest), whole.batches[2].snapshot))
    assert [batch.samples for batch in rest.batches] == [batch.samples for batch in whole.batches[3:]]
    assert [batch.snapshot for batch in rest.batches] == [batch.snapshot for batch in whole.batches[3:]]


def test_groups_without_signal_are_replaced(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=4, max_lead=1)
    trainer = FakeTrainer()
    asyncio.run(Setup(tmp_path, rollout, max_steps=5).run(trainer, FakeRunner(trainer)))
    assert [batch.metrics["groups/trained"] for batch in trainer.batches] == [4] * 5
    assert sum(batch.metrics["groups/dropped_no_signal"] for batch in trainer.batches) > 0


def test_or_the_batch_is_smaller_for_them(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=4, max_lead=0, on_no_signal="shrink")
    trainer = FakeTrainer()
    runner = FakeRunner(trainer)
    asyncio.run(Setup(tmp_path, rollout, max_steps=10).run(trainer, runner))
    sizes = [batch.metrics["groups/trained"] for batch in trainer.batches]
    assert {1, 2, 3, 4} >= set(sizes) and min(sizes) < 4
    # A batch that would be empty is tried again with as many tasks.
    dropped = sum(batch.metrics["groups/dropped_no_signal"] for batch in trainer.batches)
    assert (sum(sizes) + dropped) % 4 == 0 and len(runner.starts) == 2 * (sum(sizes) + dropped)


@pytest.mark.parametrize("on_no_signal", ["refill", "shrink"])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_run_of_equal_rewards_ends_by_rule(reward: float, on_no_signal: str, tmp_path: Path) -> None:
    rollout = RolloutConfig.model_validate(
        {
            "group_size": 2,
            "groups_per_batch": 3,
            "max_empty_batches": 4,
            "on_no_signal": on_no_signal,
        }
    )
    trainer = FakeTrainer()
    runner = FakeRunner(trainer, lambda *_: make_episode(reward))
    with pytest.raises(EnvironmentFailure, match=r"12 groups in a row.*max_empty_batches = 4"):
        asyncio.run(Setup(tmp_path, rollout, max_steps=5).run(trainer, runner))
    assert trainer.messages == []


def test_failed_episodes_are_in_neither_loss_nor_baseline(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=4, groups_per_batch=2, max_lead=0)
    trainer = FakeTrainer()

    def script(task: dict[str, Any], seed: int, version: int) -> Episode | EpisodeFailed:
        return EpisodeFailed("environment", "no") if seed % 3 == 0 else coin(task, seed, version)

    asyncio.run(Setup(tmp_path, rollout, max_steps=10).run(trainer, FakeRunner(trainer, script)))
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in _trace(tmp_path, 10):
        groups.setdefault(row["position"], []).append(row)
    assert min(len(rows) for rows in groups.values()) < 4
    for rows in groups.values():
        mean = sum(row["reward"] for row in rows) / len(rows)
        assert [row["advantage"] for row in rows] == pytest.approx([row["reward"] - mean for row in rows])
    assert sum(batch.metrics["episodes/failed/environment"] for batch in trainer.batches) > 0


def test_too_many_failures_end_the_run_with_the_first_error(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    count = 0

    def script(*_: object) -> Episode | EpisodeFailed:
        nonlocal count
        count += 1
        return make_episode(float(count % 2)) if count % 4 == 0 else EpisodeFailed("timeout", f"call {count}")

    rollout = RolloutConfig(group_size=4, groups_per_batch=2, max_error_rate=0.5, max_empty_batches=50)
    told = r"51 of the last 67 episodes failed \(51 timeout\).*call 1$"
    with pytest.raises(EnvironmentFailure, match=told):
        asyncio.run(Setup(tmp_path, rollout, max_steps=90).run(trainer, FakeRunner(trainer, script)))


def test_evaluations_are_of_the_version_that_is_due_and_travel_with_the_next_batch(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=2, max_lead=0)
    trainer = FakeTrainer()

    def script(task: dict[str, Any], seed: int, version: int) -> Episode:
        if task["source"] == "held":
            return make_episode(float(version), [version])
        return coin(task, seed, version)

    setup = Setup(tmp_path, rollout, max_steps=5, evaluation=_with_evaluation())
    asyncio.run(setup.run(trainer, FakeRunner(trainer, script)))
    means = {batch.step: batch.metrics.get("eval/held/mean") for batch in trainer.batches}
    assert means == {1: 0.0, 2: None, 3: 2.0, 4: None, 5: 4.0}
    assert trainer.end.metrics["eval/held/mean"] == 5.0 == trainer.end.metrics["eval/version"]
    assert trainer.end.sequence == 6
    assert sorted(path.name for path in tmp_path.glob("eval_*")) == [
        f"eval_version_{version}.jsonl" for version in (0, 2, 4, 5)
    ]


def test_with_a_lead_the_first_evaluation_is_still_of_version_0_alone(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=2, max_lead=1)
    trainer = FakeTrainer()
    setup = Setup(tmp_path, rollout, max_steps=3, evaluation=_with_evaluation())
    runner = FakeRunner(trainer, delay=jitter(0))
    asyncio.run(setup.run(trainer, runner))
    assert [task["source"] for task, _, _ in runner.starts[:10]] == ["held"] * 10
    assert _state(trainer.batches[0]).baseline["eval/held/mean"] >= 0


def test_a_run_that_is_complete_already_only_ends(tmp_path: Path) -> None:
    rollout = RolloutConfig(group_size=2, groups_per_batch=2)
    first, setup = FakeTrainer(), Setup(tmp_path, rollout, max_steps=2)
    asyncio.run(setup.run(first, FakeRunner(first)))
    again = FakeTrainer(2)
    asyncio.run(setup.run(again, FakeRunner(again), first.batches[-1].snapshot))
    assert again.batches == [] and again.end.sequence == 3


def _stopping(folder: Path, *, episode: float = 20.0, version: float = 20.0) -> Setup:
    rollout = RolloutConfig(group_size=2, groups_per_batch=2)
    return Setup(folder, rollout, max_steps=4, episode_seconds=episode, version_seconds=version)


def test_a_trainer_that_stands_still_ends_the_run(tmp_path: Path) -> None:
    trainer = FakeTrainer(trains=False)
    with pytest.raises(PublishError, match=r"still serves version 0, and batch 2 was sent"):
        asyncio.run(_stopping(tmp_path, version=0.2).run(trainer, FakeRunner(trainer)))


def test_episodes_that_never_end_end_the_run(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    runner = FakeRunner(trainer, delay=lambda task, seed: 3600)
    with pytest.raises(EnvironmentFailure, match=r"no episode has ended.*4 groups in flight: task \d+ of a"):
        asyncio.run(_stopping(tmp_path, episode=0.2).run(trainer, runner))
    assert runner.num_cancelled == 8


def test_a_trainer_that_is_behind_the_checkpoint_ends_the_run(tmp_path: Path) -> None:
    first = FakeTrainer()
    setup = _stopping(tmp_path, version=0.2)
    asyncio.run(setup.run(first, FakeRunner(first)))
    trainer = FakeTrainer(1)
    with pytest.raises(PublishError, match=r"trainer is at version 1, .*goes on from version 3"):
        asyncio.run(setup.run(trainer, FakeRunner(trainer), first.batches[2].snapshot))


def test_a_version_beyond_the_batches_that_were_sent_ends_the_run(tmp_path: Path) -> None:
    class Runaway(FakeTrainer):
        async def set_version(self, version: int) -> None:
            await super().set_version(9)

    trainer = Runaway()
    runner = FakeRunner(trainer, delay=jitter(0))
    with pytest.raises(PolicyServerError, match="serves version 9, but it must be from 0 to"):
        asyncio.run(_stopping(tmp_path).run(trainer, runner))


def test_a_trainer_that_is_ahead_at_the_start_ends_the_run(tmp_path: Path) -> None:
    trainer = FakeTrainer(1)
    with pytest.raises(PublishError, match=r"trainer is at version 1, .*goes on from version 0"):
        asyncio.run(_stopping(tmp_path).run(trainer, FakeRunner(trainer)))


def test_a_defect_in_the_background_ends_the_run(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    runner = FakeRunner(trainer, lambda *_: KeyError("a defect"), jitter(0))
    with pytest.raises(KeyError, match="a defect"):
        asyncio.run(_stopping(tmp_path).run(trainer, runner))


def test_an_end_that_nobody_acknowledges_ends_the_run(tmp_path: Path) -> None:
    class Deaf(FakeTrainer):
        async def acknowledged(self) -> int:
            return 0

    trainer = Deaf()
    with pytest.raises(ChannelError, match="acknowledgement of the end of the run took longer than"):
        asyncio.run(_stopping(tmp_path, version=0.5).run(trainer, FakeRunner(trainer)))


def test_samples_carry_the_advantage_of_their_episode(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    asyncio.run(_stopping(tmp_path).run(trainer, FakeRunner(trainer)))
    rows = {(row["position"], row["episode"]): row for row in _trace(tmp_path, 4)}
    for batch in trainer.batches:
        for wire in batch.samples:
            sample = from_wire(wire)
            row = rows[divmod(sample.sample_id, 2)]
            assert row["step"] == batch.step
            assert sample.streams["advantages"][1:].tolist() == [row["advantage"]] * row["num_tokens"]
