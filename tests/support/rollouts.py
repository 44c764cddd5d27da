"""A pipeline between fakes: sources without code, a policy that answers by script, a trainer that counts.

Time passes on the event loop alone; how long an episode or an update takes is the test's to say.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from contract.policy import Origin, VersionInfo
from contract.rollout import Message, RolloutBatch, RunEnd, decode_message
from contract.sections import SamplingConfig
from orchestrator.background import Background, LoopLag
from orchestrator.config import EvaluationConfig, RolloutConfig
from orchestrator.credit.grpo import GRPO
from orchestrator.dispatch import Dispatcher, places_for
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.episode import Episode, SampledTokens
from orchestrator.evaluate import Evaluator
from orchestrator.pipeline import Parts, Pipeline, Span
from orchestrator.plan import Plan, PlannedSource
from orchestrator.progress import Progress, Snapshot

SEQ_LEN = 16


@dataclass(frozen=True)
class FakeSource:
    """A source whose task i is `{"source": title, "index": i}`."""

    title: str
    num_tasks: int

    async def task(self, index: int) -> dict[str, Any]:
        return {"source": self.title, "index": index}


def make_episode(
    reward: float,
    versions: Sequence[int] = (0,),
    *,
    rewards: dict[str, float] | None = None,
    truncated: bool = False,
) -> Episode:
    """One turn: a prompt of one token, then a token of each of `versions`."""
    count = len(versions)
    sample = SampledTokens(
        [1, *range(2, 2 + count)], [False, *[True] * count], [0.0, *[-0.5] * count], [-1, *versions]
    )
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    named = {"reward": reward, **(rewards or {})}
    return Episode([sample], messages, named, 1, "length" if truncated else "stop")


class FakeTrainer:
    """Both ends of the outside: takes batches, and serves a version as soon as it has trained on one."""

    def __init__(self, version: int = 0, *, step_seconds: float = 0.0, trains: bool = True) -> None:
        self.version = version
        self.messages: list[Message] = []
        self._step_seconds = step_seconds
        self._trains = trains
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    @property
    def batches(self) -> list[RolloutBatch]:
        return [message for message in self.messages if isinstance(message, RolloutBatch)]

    @property
    def end(self) -> RunEnd:
        (end,) = [message for message in self.messages if isinstance(message, RunEnd)]
        return end

    async def send(self, sequence: int, frame: bytes) -> None:
        message = decode_message(frame)
        assert message.sequence == sequence
        self.messages.append(message)
        if isinstance(message, RolloutBatch) and self._trains:
            task = asyncio.ensure_future(self._train(message.step))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def receiver(self) -> str | None:
        return "trainer"

    async def weights(self) -> dict[str, VersionInfo]:
        return {"http://fake": VersionInfo(self.version, Origin("run", "trainer"))}

    async def acknowledged(self) -> int:
        return self.messages[-1].sequence if self._trains and self.messages else 0

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def set_version(self, version: int) -> None:
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def wait_for_version(self, at_least: int, timeout_seconds: float) -> int:
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._changed.wait_for(lambda: self.version >= at_least)
            except TimeoutError:
                pass
            return self.version

    async def _train(self, step: int) -> None:
        async with self._turn:
            await asyncio.sleep(self._step_seconds)
            assert self.version == step - 1
            await self.set_version(step)


Script = Callable[[dict[str, Any], int, int], Episode | EpisodeFailed | BaseException]
"""(task, seed, version at its start) -> what becomes of the episode."""
Delay = Callable[[dict[str, Any], int], float]
"""(task, seed) -> seconds that the episode takes."""


def coin(task: dict[str, Any], seed: int, version: int) -> Episode:
    """Reward 0 or 1 by the seed alone."""
    return make_episode(float(seed % 2), [version] * (1 + seed % 7))


class FakeRunner:
    """Runs episodes by script.

    Attributes:
        starts: (task, seed, version) of every episode that began.
        most_running: episodes at a time.
        num_cancelled: episodes that were ended before their time.
    """

    def __init__(self, trainer: FakeTrainer, script: Script = coin, delay: Delay | None = None) -> None:
        self.starts: list[tuple[dict[str, Any], int, int]] = []
        self.most_running = 0
        self.num_cancelled = 0
        self._running = 0
        self._trainer = trainer
        self._script = script
        self._delay = delay

    async def run(self, source: Any, task: dict[str, Any], *, sampling: SamplingConfig, seed: int) -> Episode:
        version = self._trainer.version
        self.starts.append((task, seed, version))
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            if self._delay is not None:
                await asyncio.sleep(self._delay(task, seed))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self._running -= 1
        result = self._script(task, seed, version)
        if isinstance(result, BaseException):
            raise result
        return result


def jitter(seed: int, most: float = 0.004) -> Delay:
    """Durations that differ from call to call."""
    generator = random.Random(seed)
    return lambda task, episode_seed: generator.uniform(0, most)


@dataclass
class Setup:
    """What a run is made of; `make` builds the pipeline, for one event loop."""

    rollouts: Path
    rollout: RolloutConfig
    max_steps: int
    sources: Sequence[FakeSource] = (FakeSource("a", 40), FakeSource("b", 25))
    weights: Sequence[float] = (2.0, 1.0)
    seed: int = 0
    evaluation: EvaluationConfig | None = None
    episode_seconds: float = 20.0
    version_seconds: float = 20.0
    counts: Callable[[], Mapping[str, int]] = dict

    def plan(self, counts: Sequence[int] | None = None) -> Plan:
        planned = [
            PlannedSource(source.title, weight, source.num_tasks)
            for source, weight in zip(self.sources, self.weights, strict=True)
        ]
        return Plan(planned, self.seed, counts)

    def make(self, trainer: FakeTrainer, runner: FakeRunner, snapshot: bytes | None = None) -> Pipeline:
        state = None if snapshot is None else msgspec.json.decode(snapshot, type=Snapshot)
        size = self.rollout.group_size
        if state is None:
            progress = Progress(self.plan(), size)
        else:
            progress = Progress(self.plan(state.counts), size, state.outstanding)
        background, limiter = Background(), asyncio.Semaphore(places_for(self.rollout))
        evaluator = None
        if self.evaluation is not None:
            held_out = [FakeSource(source.title, 1000) for source in self.evaluation.sources]
            evaluator = Evaluator(
                self.evaluation,
                held_out,
                runner,
                sampling=SamplingConfig(),
                seed=self.seed,
                limiter=limiter,
                rollouts=self.rollouts,
                episode_timeout_seconds=self.rollout.episode_timeout_seconds,
            )
        dispatcher = Dispatcher(
            self.sources,
            runner,
            progress,
            GRPO(normalize_std=False),
            rollout=self.rollout,
            sampling=SamplingConfig(),
            seed=self.seed,
            limiter=limiter,
            background=background,
        )
        span = Span(
            "run",
            0 if state is None else state.step,
            self.max_steps,
            SEQ_LEN,
            self.rollout.lead == 0,
            self.rollouts,
            self.episode_seconds,
            self.version_seconds,
        )
        parts = Parts(trainer, trainer, progress, dispatcher, evaluator, background, LoopLag(), self.counts)
        return Pipeline(span, parts, state)

    async def run(self, trainer: FakeTrainer, runner: FakeRunner, snapshot: bytes | None = None) -> None:
        """To the end, within 60 seconds."""
        try:
            async with asyncio.timeout(60):
                await self.make(trainer, runner, snapshot).run()
        finally:
            await trainer.close()
