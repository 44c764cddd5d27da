"""The main loop of the orchestrator: sample, choose, ship, batch after batch, to the end of the run.

Owns the order of things in time: which version is served, when batches may be sampled (`staleness`), when an
evaluation runs, and the end. Groups are `dispatch`'s, the content of messages is `assemble`'s.

Invariants: batch n is sent once, after its trace is on disk, and carries the state of `Progress` at the
moment its groups were chosen. Whatever is waited for has a limit; an error of any task ends `run`. Nothing is
saved here: a pause ends this process, and the snapshot in the checkpoint is where the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from contract.channel.base import Sender
from contract.errors import (
    ChannelError,
    EnvironmentFailure,
    PolicyServerError,
    PublishError,
    RunFolderError,
)
from contract.policy import Origin
from contract.rollout import RolloutBatch, RunEnd, encode_message
from orchestrator.assemble import BatchInfo, build_batch, trace_rows
from orchestrator.background import Background, LoopLag, time_limit
from orchestrator.dispatch import Dispatcher, Taken
from orchestrator.evaluate import Evaluator, print_comparison
from orchestrator.meeting import VersionClient, check_servers, wait_for_trainer
from orchestrator.progress import Progress, Snapshot
from orchestrator.trace import remove_later, trace_path, write_trace

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_POLL_SECONDS = 20.0
_ACKNOWLEDGE_INTERVAL = 0.1


@dataclass(frozen=True, slots=True)
class Span:
    """From where to where this run goes, and under which limits.

    Attributes:
        run_id: what messages carry.
        first_version: that training goes on from: 0, or the step of the checkpoint.
        max_steps: the last batch.
        seq_len: longest sample, prompt included, in tokens.
        is_synchronous: there is no lead, and nothing is sampled while an evaluation runs.
        rollouts: folder of the traces.
        episode_seconds: longest time in which no episode ends while some are under way.
        version_seconds: longest wait for the next version, and for the acknowledgement of the end.
    """

    run_id: str
    first_version: int
    max_steps: int
    seq_len: int
    is_synchronous: bool
    rollouts: Path
    episode_seconds: float
    version_seconds: float


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives; whoever made them closes them, but for `background`.

    Attributes:
        counts: what was counted since the start, by name; metrics say how much since the last batch.
    """

    client: VersionClient
    sender: Sender
    progress: Progress
    dispatcher: Dispatcher
    evaluator: Evaluator | None
    background: Background
    lag: LoopLag
    counts: Callable[[], Mapping[str, int]]


class Pipeline:
    """One run from `first_version` to `max_steps`."""

    def __init__(self, span: Span, parts: Parts, snapshot: Snapshot | None = None) -> None:
        """
        Args:
            snapshot: of a run that goes on.
        """
        self._span = span
        self._parts = parts
        self._baseline = {} if snapshot is None else dict(snapshot.baseline)
        self._version = span.first_version
        self._step = span.first_version + 1
        # Versions up to this one have been evaluated, or were not due.
        self._version_checked = span.first_version - 1
        self._evaluating: int | None = None
        # Finished ones that no message has had yet, by version.
        self._evaluations: dict[int, dict[str, float]] = {}
        self._last_evaluated = None if snapshot is None else snapshot.evaluated
        self._counts = dict(parts.counts())
        now = time.monotonic()
        self._marker: tuple[int, ...] = ()
        self._marker_time = now
        self._batch_begin = now
        self._idle_seconds = 0.0

    def status(self) -> dict[str, int]:
        """What it is at, for the console."""
        dispatcher = self._parts.dispatcher
        return {
            "batch": min(self._step, self._span.max_steps),
            "version": self._version,
            "groups in flight": dispatcher.num_in_flight,
            "episodes": dispatcher.num_episodes_ended,
        }

    async def run(self) -> None:
        """Sample and ship every batch, then end the run in agreement with the trainer.

        Raises:
            EnvironmentFailure: too much fails, nothing can be learned, or no episode ends any more.
            PolicyServerError: the policy server is out of reach, has not the weights of this run's trainer,
                or serves a version that it cannot have.
            PublishError: no trainer comes, it begins with another version, or the next one does not come.
            ChannelError: a message cannot be handed over, or the end is not acknowledged.
        """
        background = self._parts.background
        try:
            await self._recall_evaluations()
            await self._meet_trainer()
            background.start(self._parts.lag.run(), "event loop lag")
            background.start(self._follow_version(), "policy version")
            self._batch_begin = self._marker_time = time.monotonic()
            while self._step <= self._span.max_steps:
                await self._turn()
            await self._end()
        finally:
            await background.close()

    async def _turn(self) -> None:
        """Do all that can be done now, then wait for a change."""
        dispatcher, step = self._parts.dispatcher, self._step
        # Cleared first: what changes from here on is seen by the wait at the end.
        self._parts.background.changed.clear()
        self._parts.background.raise_if_failed()
        self._evaluate_if_due()
        dispatcher.give_up_stale(step)
        taken = dispatcher.take(step)
        if taken is not None:
            await self._ship(taken)
            return
        if not self._evaluation_holds_sampling():
            dispatcher.fill(step, self._version, self._span.max_steps)
        await self._wait()

    async def _ship(self, taken: Taken) -> None:
        span, step = self._span, self._step
        # Before anything is awaited: the snapshot is of the moment in which the groups were chosen.
        snapshot = self._parts.progress.snapshot(step, self._baseline, self._evaluated())
        extra = {**self._take_evaluation(), **self._take_counts()}
        info = BatchInfo(span.run_id, step, self._parts.progress.epoch, snapshot, extra)
        batch = build_batch(taken, info)
        batch.metrics.update(self._times(batch))
        await asyncio.to_thread(write_trace, trace_path(span.rollouts, step), trace_rows(taken.groups, step))
        # First: the trainer may have published this version before `_send` is back.
        self._step += 1
        await self._send(step, encode_message(batch), f"handing over batch {step}")
        logger.debug(
            "batch %d: %d episodes, reward %.4g", step, batch.num_episodes, batch.metrics["reward/mean"]
        )

    async def _send(self, sequence: int, frame: bytes, what: str) -> None:
        async with time_limit(self._span.version_seconds, what, ChannelError):
            await self._parts.sender.send(sequence, frame)

    async def _end(self) -> None:
        """After the last batch: its version, the final evaluation, and the trainer's leave to go."""
        span = self._span
        while True:
            self._parts.background.changed.clear()
            self._parts.background.raise_if_failed()
            self._evaluate_if_due()
            if self._version >= span.max_steps and self._evaluating is None:
                break
            await self._wait()
        metrics = self._take_evaluation()
        print_comparison(self._baseline, metrics)
        sequence = self._step
        end = RunEnd(span.run_id, sequence, f"all {span.max_steps} batches are done", metrics)
        await self._send(sequence, encode_message(end), "handing over the end of the run")
        what = "the trainer's acknowledgement of the end of the run"
        async with time_limit(span.version_seconds, what, ChannelError):
            while await self._parts.sender.acknowledged() < sequence:
                self._parts.background.raise_if_failed()
                await asyncio.sleep(_ACKNOWLEDGE_INTERVAL)

    # -- versions

    async def _meet_trainer(self) -> None:
        span, parts = self._span, self._parts
        what = (
            "the trainer, whose first weights and first request for a batch are waited for "
            "(rollout.version_timeout_seconds),"
        )
        async with time_limit(span.version_seconds, what, PublishError):
            origin = Origin(span.run_id, await wait_for_trainer(parts.sender))
        check_servers(await parts.client.weights(), origin, span.first_version, span.seq_len)
        # Not before: they may be all there is of later steps, if this orchestrator was told the wrong one.
        await asyncio.to_thread(remove_later, span.rollouts, span.first_version)

    async def _follow_version(self) -> None:
        while self._version < self._span.max_steps:
            version = await self._parts.client.wait_for_version(self._version + 1, _POLL_SECONDS)
            self._check_version(version)
            if version > self._version:
                self._version = version
                self._parts.background.changed.set()

    def _check_version(self, version: int) -> None:
        """Weights of batch n cannot be served before batch n was sent, and versions never go back."""
        if not self._version <= version <= max(self._step - 1, self._version):
            raise PolicyServerError(
                f"the policy server serves version {version}, but it must be from {self._version} to "
                f"{self._step - 1}: batch {self._step} is being sampled. It was restarted, or belongs to "
                f"another run"
            )

    # -- evaluation

    def _evaluate_if_due(self) -> None:
        evaluator, version = self._parts.evaluator, self._version
        if evaluator is None or self._evaluating is not None or version == self._version_checked:
            return
        passed = range(self._version_checked + 1, version + 1)
        self._version_checked = version
        if any(evaluator.is_due(one, self._span.max_steps) for one in passed):
            self._evaluating = version
            self._parts.background.start(self._evaluate(evaluator, version), f"evaluation of {version}")

    async def _evaluate(self, evaluator: Evaluator, version: int) -> None:
        begin = time.monotonic()
        metrics = await evaluator.run(version)
        if version == 0:
            self._baseline = metrics
        seconds = time.monotonic() - begin
        self._evaluations[version] = {**metrics, "time/evaluation": seconds}
        self._evaluating = None

    def _evaluation_holds_sampling(self) -> bool:
        """Version 0 is the measure that the end is compared with: nothing may change it meanwhile."""
        return self._evaluating is not None and (self._span.is_synchronous or self._evaluating == 0)

    async def _recall_evaluations(self) -> None:
        """Of versions whose weights are gone: all that is left is what the earlier process wrote."""
        evaluator, last = self._parts.evaluator, self._last_evaluated
        if evaluator is None or last is None:
            return
        versions, reason = range(last + 1, self._span.first_version), "it was not finished"
        for version in versions:
            try:
                metrics = await asyncio.to_thread(evaluator.recall, version)
            except RunFolderError as error:  # numbers for a chart: no reason not to train
                metrics, reason = {}, str(error)
            if metrics:
                self._evaluations[version] = metrics
        due = [version for version in versions if evaluator.is_due(version, self._span.max_steps)]
        if due and not self._evaluations:
            logger.warning(
                "the evaluation of version %d, due when the run was stopped, has no result: %s",
                due[-1],
                reason,
            )

    def _evaluated(self) -> int | None:
        """See `Snapshot`."""
        if self._parts.evaluator is None:
            return None
        return self._version_checked if self._evaluating is None else self._evaluating - 1

    def _take_evaluation(self) -> dict[str, float]:
        """The metrics of the newest that no message has had."""
        if not self._evaluations:
            return {}
        found, self._evaluations = self._evaluations, {}
        newest = max(found)
        for version in sorted(found.keys() - {newest}):
            values = ", ".join(f"{name} {value:.4g}" for name, value in found[version].items())
            logger.info(
                "the evaluation of version %d is not among the metrics, where that of version %d takes its "
                "place: %s",
                version,
                newest,
                values,
            )
        return {**found[newest], "eval/version": float(newest)}

    def _take_counts(self) -> dict[str, float]:
        before, self._counts = self._counts, dict(self._parts.counts())
        return {name: float(count - before.get(name, 0)) for name, count in self._counts.items()}

    # -- time

    def _times(self, batch: RolloutBatch) -> dict[str, float]:
        now = time.monotonic()
        seconds = max(now - self._batch_begin, 1e-9)
        metrics = {
            "time/rollout": seconds,
            "time/rollout_idle": self._idle_seconds,
            "time/event_loop_lag": self._parts.lag.take(),
            "rate/episodes_per_second": batch.num_episodes / seconds,
            "rate/sampled_tokens_per_second": batch.metrics["tokens/sampled"] / seconds,
        }
        self._batch_begin, self._idle_seconds = now, 0.0
        return metrics

    async def _wait(self) -> None:
        """Until something has changed, for a moment at most; raises if the run stands still."""
        begin = time.monotonic()
        is_idle = not self._parts.dispatcher.num_in_flight and self._evaluating is None
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._parts.background.changed.wait()
        except TimeoutError:
            pass
        now = time.monotonic()
        if is_idle:
            self._idle_seconds += now - begin
        self._watch(now, is_idle)

    def _watch(self, now: float, is_idle: bool) -> None:
        dispatcher, evaluator = self._parts.dispatcher, self._parts.evaluator
        num_evaluated = 0 if evaluator is None else evaluator.num_episodes_ended
        marker = (self._version, self._step, dispatcher.num_episodes_ended, num_evaluated, int(is_idle))
        if marker != self._marker:
            self._marker, self._marker_time = marker, now
            return
        seconds = now - self._marker_time
        if is_idle and seconds > self._span.version_seconds:
            raise PublishError(
                f"the policy server still serves version {self._version}, and batch {self._step - 1} was "
                f"sent {seconds:.0f} s ago (rollout.version_timeout_seconds = "
                f"{self._span.version_seconds:g}); the trainer, or its way to the policy server, stands still"
            )
        if not is_idle and seconds > self._span.episode_seconds:
            raise EnvironmentFailure(
                f"no episode has ended for {seconds:.0f} s, more than all time limits of an episode "
                f"together; version {self._version}, batch {self._step}, {dispatcher.describe()}"
            )
