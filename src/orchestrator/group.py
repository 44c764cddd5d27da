"""A group: the episodes of one task that are compared with each other, and what became of it.

Owns the judgement of a finished group: who counts, the advantages, and whether there is anything to learn.
A group is known by its position in the plan, never by the text of its prompt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import xxhash

from contract.batch import Sample
from contract.sections import SamplingConfig
from orchestrator.credit.base import Credit
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.plan import Draw
from orchestrator.sample import to_samples

if TYPE_CHECKING:
    from orchestrator.episode import Episode

Outcome = Literal["signal", "no_signal", "failed"]

_MIN_VALID = 2
"""Fewer episodes have nothing to be compared with."""
_OUTAGES = frozenset({"server", "worker"})
"""Kinds of failures that happen to an episode, and may not happen to it again."""


class TaskSource(Protocol):
    """What the pipeline needs of a source; `LoadedSource` is one."""

    @property
    def title(self) -> str:
        """Name in metrics."""
        ...

    @property
    def num_tasks(self) -> int:
        """Number of its tasks."""
        ...

    async def task(self, index: int) -> Any:
        """The task `index`. Raises `EpisodeFailed`."""
        ...


class Runner(Protocol):
    """What the pipeline needs of `EpisodeRunner`."""

    async def run(self, source: Any, task: Any, *, sampling: SamplingConfig, seed: int) -> Episode:
        """One episode; raises `EpisodeFailed`."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """What metrics need of a valid episode, kept when the episode is not."""

    position: int
    index: int
    source: str
    reward: float
    rewards: Mapping[str, float]
    num_sampled: int
    num_turns: int
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """A valid episode with its advantage and what it gives the trainer."""

    index: int
    episode: Episode
    advantage: float
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """A group all of whose episodes have ended.

    Attributes:
        episodes: to train on; empty unless `outcome` is `signal`.
        stats: of every valid episode.
        oldest_version: that sampled a token of `episodes`; None if there is none.
        failure: of the first of its episodes that failed.
        is_outage: it has failed, and would not have without the outages of policy server and workers.
    """

    draw: Draw
    source: str
    outcome: Outcome
    episodes: Sequence[ScoredEpisode]
    stats: Sequence[EpisodeStats]
    oldest_version: int | None
    failure: EpisodeFailed | None
    is_outage: bool = False

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy drew for it."""
        return sum(stat.num_sampled for stat in self.stats)


def judge(
    draw: Draw,
    source: str,
    outcomes: Sequence[Episode | EpisodeFailed],
    *,
    credit: Credit,
    temperature: float,
) -> JudgedGroup:
    """Score a group.

    Failed episodes are in neither loss nor baseline. With fewer than two valid ones the group has failed; if
    no token of it has a weight in any loss component other than 0 (an advantage of 0 is none), it has no
    signal.

    Args:
        outcomes: one per episode, in order.
    """
    valid = [(i, one) for i, one in enumerate(outcomes) if not isinstance(one, EpisodeFailed)]
    stats = [
        EpisodeStats(
            draw.position,
            i,
            source,
            one.reward,
            one.rewards,
            one.num_sampled,
            one.num_turns,
            one.is_truncated,
        )
        for i, one in valid
    ]
    failures = [one for one in outcomes if isinstance(one, EpisodeFailed)]
    failure = failures[0] if failures else None
    if len(valid) < _MIN_VALID:
        num_outages = sum(one.kind in _OUTAGES for one in failures)
        is_outage = len(valid) + num_outages >= _MIN_VALID
        return JudgedGroup(draw, source, "failed", (), stats, None, failure, is_outage)
    advantages = credit.advantages([one.reward for _, one in valid])
    scored = [
        ScoredEpisode(
            i, one, advantage, to_samples(one, advantage, temperature, draw.position * len(outcomes) + i)
        )
        for (i, one), advantage in zip(valid, advantages, strict=True)
    ]
    if not any(has_signal(sample) for one in scored for sample in one.samples):
        return JudgedGroup(draw, source, "no_signal", (), stats, None, failure)
    oldest = min(one.oldest_version for _, one in valid)
    return JudgedGroup(draw, source, "signal", scored, stats, oldest, failure)


def check_episode(episode: Episode) -> None:
    """Raises `EpisodeFailed` if nothing can be learned from an episode that came to its end: it has no
    sampled token, or a reward that is no finite number.
    """
    if episode.num_sampled == 0:
        raise EpisodeFailed("empty", "the policy drew no token")
    if not math.isfinite(episode.reward):
        raise EpisodeFailed("environment", f"the reward is {episode.reward}; it must be a finite number")


async def run_episode(
    runner: Runner, source: Any, task: Any, *, sampling: SamplingConfig, seed: int, timeout_seconds: float
) -> Episode:
    """One episode that something can be learned from.

    Raises:
        EpisodeFailed: it failed, took longer than `timeout_seconds` (`timeout`), or teaches nothing.
    """
    limit = asyncio.timeout(timeout_seconds)
    try:
        async with limit:
            episode = await runner.run(source, task, sampling=sampling, seed=seed)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EpisodeFailed(
            "timeout",
            f"the episode was not over within rollout.episode_timeout_seconds = {timeout_seconds:g}",
        ) from error
    check_episode(episode)
    return episode


def derive_seed(*parts: int) -> int:
    """A seed below 2**63 that depends on all of `parts` and their order."""
    return xxhash.xxh3_64_intdigest(",".join(map(str, parts)).encode()) >> 1


def has_signal(sample: Sample) -> bool:
    """Whether a token of it weighs in any loss component; in `rl`, with an advantage other than 0."""
    for component, weights in sample.weights.items():
        if component == "rl":
            weights = weights * sample.streams["advantages"]
        # Position 0 predicts nothing.
        if np.any(weights[1:]):
            return True
    return False
