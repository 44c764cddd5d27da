"""Groups in flight: which are started when, and what becomes of them until they are in a batch.

Owns everything between `Progress` (which position is next) and `assemble` (the batch): starting groups
within the lead and the limit of concurrent episodes, giving up those that grew too old, judging those that
have ended, and choosing those of a batch. A group that is given up is given back to `Progress` and sampled
again, as is, once, one that failed by outages of the policy server or of workers; any other that failed, or
is dropped for want of signal, is done.

Choosing: with a lead of 0 (`RolloutConfig.lead`) exactly the groups of one batch are ever under way, so a
batch is a function of the plan and the episodes, whatever the timing. With a lead, groups are taken in order
of completion.

A group is given up whole, with all its episodes, even if only one token is too old: its baseline belongs to
all. What that wastes is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from contract.sections import SamplingConfig
from orchestrator.background import Background, run_all
from orchestrator.config import RolloutConfig
from orchestrator.credit.base import Credit
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.group import (
    EpisodeStats,
    JudgedGroup,
    Runner,
    TaskSource,
    derive_seed,
    judge,
    run_episode,
)
from orchestrator.limits import EmptyRule, ErrorRate
from orchestrator.plan import Draw
from orchestrator.progress import Progress
from orchestrator.staleness import is_too_old, last_step_allowed

if TYPE_CHECKING:
    from orchestrator.episode import Episode


@dataclass(slots=True)
class Tally:
    """What happened since the last batch, besides the groups that are in this one."""

    num_no_signal: int = 0
    num_failed_groups: int = 0
    num_stale: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    wasted_tokens: int = 0
    stats: list[EpisodeStats] = field(default_factory=list)
    """Of the valid episodes of groups that were dropped."""
    num_outage: int = 0
    """Groups that failed by outages and are sampled again."""
    no_signal_rewards: list[float] = field(default_factory=list)
    """The reward of the episodes of each group without signal."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups of one batch, by position, and the tally that goes with it."""

    groups: Sequence[JudgedGroup]
    tally: Tally


class _Flight:
    """A group whose episodes run or wait for their turn."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.task: asyncio.Task[None] | None = None
        self.begin = time.monotonic()
        self.num_sampled = 0
        # Per episode that has begun: the oldest version it may hold; once it has ended, the one it does hold.
        self.versions: dict[int, int] = {}

    @property
    def oldest_version(self) -> int | None:
        return min(self.versions.values(), default=None)


class Dispatcher:
    """Keeps the groups of the next batches under way."""

    def __init__(
        self,
        sources: Sequence[TaskSource],
        runner: Runner,
        progress: Progress,
        credit: Credit,
        *,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        seed: int,
        limiter: asyncio.Semaphore,
        background: Background,
    ) -> None:
        """
        Args:
            sources: in the order of the plan's.
            limiter: a place for each episode that may run at a time.
            background: where groups run.
        """
        self._sources = sources
        self._runner = runner
        self._progress = progress
        self._credit = credit
        self._rollout = rollout
        self._sampling = sampling
        self._seed = seed
        self._limiter = limiter
        self._background = background
        self._flights: dict[int, _Flight] = {}
        # In order of completion. With on_no_signal = "shrink" a group that was dropped keeps its place here.
        self._finished: list[JudgedGroup] = []
        # Positions that have been given back for an outage, and are not done.
        self._retried: set[int] = set()
        self._tally = Tally()
        self._error_rate = ErrorRate(rollout.max_error_rate)
        self._empty_rule = EmptyRule(rollout)
        self._version = 0
        # That groups were looked at for.
        self._step = 0
        self.num_episodes_ended = 0
        """Since the start; a run that stands still is told by it."""

    @property
    def num_in_flight(self) -> int:
        """Groups under way."""
        return len(self._flights)

    def describe(self) -> str:
        """What is under way, for the message of a run that stands still."""
        now = time.monotonic()
        oldest = sorted(self._flights.values(), key=lambda flight: flight.begin)[:5]
        groups = ", ".join(
            f"task {flight.draw.task} of {self._sources[flight.draw.source].title} (position "
            f"{flight.draw.position}) for {now - flight.begin:.0f} s"
            for flight in oldest
        )
        return f"{len(self._flights)} groups in flight: {groups}" if groups else "no group in flight"

    def fill(self, step: int, version: int, max_steps: int) -> None:
        """Start groups for the batches that may be sampled now.

        Args:
            step: the next batch.
            version: that the policy server serves.
            max_steps: the last batch of the run.
        """
        self._version = version
        rollout = self._rollout
        last = last_step_allowed(version, rollout.max_lead, rollout.max_off_policy_steps, max_steps)
        places = (last - step + 1) * rollout.groups_per_batch
        while len(self._flights) + len(self._finished) < places:
            flight = _Flight(self._progress.take())
            self._flights[flight.draw.position] = flight
            name = f"group at position {flight.draw.position}"
            flight.task = self._background.start(self._run_group(flight), name)

    def give_up_stale(self, step: int) -> None:
        """Cancel the groups in flight that could not join batch `step`, the earliest that is left, and drop
        those that have finished.
        """
        if step == self._step:  # Nothing grows older meanwhile, and there may be thousands to look at.
            return
        self._step = step
        self._sweep(step)
        for flight in list(self._flights.values()):
            if is_too_old(step, flight.oldest_version, self._rollout.max_off_policy_steps):
                assert flight.task is not None
                flight.task.cancel()
                del self._flights[flight.draw.position]
                self._give_up(flight.draw, flight.num_sampled)

    def take(self, step: int) -> Taken | None:
        """The groups of batch `step`, or None if there are not enough yet. No token of them is older than
        the bound; their positions are done.
        """
        size = self._rollout.groups_per_batch
        while True:
            # Once more: a server that lags gives tokens older than the version that they were begun with.
            if len(self._finished) >= size:
                self._sweep(step)
            if len(self._finished) < size:
                return None
            chosen, self._finished = self._finished[:size], self._finished[size:]
            groups = sorted(
                (group for group in chosen if group.outcome == "signal"),
                key=lambda group: group.draw.position,
            )
            if groups:
                break
        for group in groups:
            self._finish(group.draw)
        tally, self._tally = self._tally, Tally()
        return Taken(groups, tally)

    def _sweep(self, step: int) -> None:
        kept: list[JudgedGroup] = []
        for group in self._finished:
            if is_too_old(step, group.oldest_version, self._rollout.max_off_policy_steps):
                self._give_up(group.draw, group.num_sampled)
            else:
                kept.append(group)
        self._finished = kept

    def _give_up(self, draw: Draw, num_sampled: int) -> None:
        self._tally.num_stale += 1
        self._tally.wasted_tokens += num_sampled
        self._progress.give_back(draw)

    async def _run_group(self, flight: _Flight) -> None:
        draw, size = flight.draw, self._rollout.group_size
        source = self._sources[draw.source]
        outcomes: Sequence[Episode | EpisodeFailed]
        try:
            task = await source.task(draw.task)
        except EpisodeFailed as failure:
            for _ in range(size):
                self._record(failure)
            outcomes = [failure] * size
        else:
            outcomes = await run_all(self._run_episode(flight, source, task, i) for i in range(size))
        # From here to the end nothing is awaited: a group that was given up does not come here.
        del self._flights[draw.position]
        group = judge(
            draw,
            source.title,
            outcomes,
            credit=self._credit,
            temperature=self._sampling.temperature,
        )
        self._empty_rule.record(group)
        self._keep(group)

    async def _run_episode(
        self, flight: _Flight, source: TaskSource, task: object, index: int
    ) -> Episode | EpisodeFailed:
        draw = flight.draw
        seed = derive_seed(self._seed, draw.position, index, draw.attempt)
        try:
            async with self._limiter:
                flight.versions[index] = self._version
                episode = await run_episode(
                    self._runner,
                    source,
                    task,
                    sampling=self._sampling,
                    seed=seed,
                    timeout_seconds=self._rollout.episode_timeout_seconds,
                )
            flight.versions[index] = episode.oldest_version
            flight.num_sampled += episode.num_sampled
        except EpisodeFailed as failure:
            flight.versions.pop(index, None)
            self._record(failure)
            return failure
        self._record(None)
        return episode

    def _record(self, failure: EpisodeFailed | None) -> None:
        self.num_episodes_ended += 1
        if failure is not None:
            self._tally.failures[failure.kind] += 1
        self._error_rate.record(failure)

    def _keep(self, group: JudgedGroup) -> None:
        if group.outcome == "signal":
            self._finished.append(group)
            return
        self._tally.wasted_tokens += group.num_sampled
        if group.is_outage and group.draw.position not in self._retried:
            self._retried.add(group.draw.position)
            self._tally.num_outage += 1
            self._progress.give_back(group.draw)
            return
        self._finish(group.draw)
        self._tally.stats.extend(group.stats)
        if group.outcome == "no_signal":
            self._tally.num_no_signal += 1
            self._tally.no_signal_rewards.append(group.stats[0].reward)
        else:
            self._tally.num_failed_groups += 1
        if self._rollout.on_no_signal == "shrink":
            self._finished.append(group)

    def _finish(self, draw: Draw) -> None:
        self._retried.discard(draw.position)
        self._progress.finish(draw)


def places_for(config: RolloutConfig) -> int:
    """Episodes that may run at a time."""
    if config.max_concurrent is not None:
        return config.max_concurrent
    return (config.lead + 1) * config.batch_size
