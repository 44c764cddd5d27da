"""The training loop, the same for every kind of training.

One iteration is one optimizer update. What differs between kinds of training is in the source, the objective,
the publisher and the hooks; the loop never asks which they are. Every method is collective.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from contract.batch import StepBatch
from contract.errors import EXIT_OK, EXIT_PAUSED, EXIT_SIGNAL_BASE, NonFiniteError
from telemetry.spans import Spans
from trainer.checkpoint.manager import CheckpointManager
from trainer.engine import Engine
from trainer.hooks.base import Hook
from trainer.optimizer.schedule import Schedule
from trainer.parallel.process import Process
from trainer.parallel.stop import Decision, Requests
from trainer.publish.base import Publisher
from trainer.source.base import PENDING, Source
from trainer.state import TrainState

logger = logging.getLogger(__name__)

Values = Mapping[str, float | int | None]


class Reporter(Protocol):
    """Takes the metrics of the loop."""

    def report(self, state: TrainState, values: Values, batch: StepBatch | None) -> None:
        """Metrics of `state.step`; `batch` is that of the step, or None for what comes beside a step."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps_done: updates of this process.
        ending: what asked for the end before the run was complete; empty if it is complete.
        signum: the signal that did; 0 after a pause, and if the run is complete.
    """

    steps_done: int
    ending: str = ""
    signum: int = 0

    @property
    def exit_code(self) -> int:
        """That of the process."""
        if self.signum:
            return EXIT_SIGNAL_BASE + self.signum
        return EXIT_PAUSED if self.ending else EXIT_OK


@dataclass(frozen=True, slots=True)
class _Counts:
    """Global sums over the micro-batches of one update."""

    denominators: dict[str, float]
    num_tokens: int


class Loop:
    """Trains until `total_steps`, the end of the data, or a request to end or pause."""

    def __init__(
        self,
        *,
        process: Process,
        engine: Engine,
        source: Source,
        publisher: Publisher,
        checkpoint: CheckpointManager,
        hooks: Sequence[Hook],
        reporter: Reporter,
        requests: Requests,
        state: TrainState,
        schedule: Schedule,
        total_steps: int,
        on_non_finite: Literal["skip", "stop"],
    ) -> None:
        self._process = process
        self._engine = engine
        self._source = source
        self._publisher = publisher
        self._checkpoint = checkpoint
        self._hooks = hooks
        self._reporter = reporter
        self._requests = requests
        self._state = state
        self._schedule = schedule
        self._total_steps = total_steps
        self._on_non_finite = on_non_finite
        self._spans = Spans()

    def fit(self) -> Outcome:
        """Run all steps, then what belongs to the end: the final save and the hooks' last words."""
        first_step = self._state.step
        self._requests.arm()
        decision = self._decide()
        if not decision.ending:
            # First of all, so that who samples from the policy can begin meanwhile. Also of a run whose steps
            # are all done: its end may be missing, which comes after the last version is served.
            self._report(self._publisher.publish(first_step))
            if first_step < self._total_steps:
                self._run_hooks("before_training")
            decision = self._decide()
        while not decision.ending and self._state.step < self._total_steps:
            batch, decision = self._next_batch()
            counts = self._agree_on_counts(batch)
            if batch is None or counts is None:
                break
            self._step(batch, counts)
            decision = self._decide()
        steps_done = self._state.step - first_step
        if steps_done:
            # A run that was complete already, or was ended before its first step, has nothing new to save.
            self._save_last()
        if not decision.ending:
            self._run_hooks("finish")
            # A hook that waits takes requests as the loop does.
            decision = self._requests.decided
        return Outcome(steps_done, decision.ending, decision.signum)

    def _decide(self) -> Decision:
        """Whether the run goes on, by all ranks together; saves now if that was asked for."""
        decision = self._requests.decide(self._process, self._state.step)
        if decision.save:
            self._report(self._checkpoint.save_if_due(self._state.step, now=True))
        return decision

    def _next_batch(self) -> tuple[StepBatch | None, Decision]:
        """The batch of the next update, waiting for it; None if there is no more data, or if the decision is
        to end before it came.
        """
        self._spans.restart()
        while True:
            self._report(self._checkpoint.poll())
            with self._spans.span("data"):
                batch = self._source.next_step()
            if batch is not PENDING:
                return batch, Decision()
            decision = self._decide()
            if decision.ending:
                return None, decision

    def _step(self, batch: StepBatch, counts: _Counts) -> None:
        """One update, and what follows it."""
        values = self._update(batch, counts)
        # Before the save, which who samples from the policy need not wait for.
        published = self._publisher.publish(self._state.step)
        times = self._spans.collect()
        self._reporter.report(self._state, {**values, **published, **times}, batch)
        self._report(self._checkpoint.save_if_due(self._state.step))
        self._run_hooks("after_step")

    def _agree_on_counts(self, batch: StepBatch | None) -> _Counts | None:
        """Global counts of trainable tokens per component, or None if the data is exhausted."""
        components = self._engine.components
        micro_batches = batch.micro_batches if batch is not None else ()
        local = [float(batch is not None), float(sum(item.num_tokens for item in micro_batches))]
        local += [float(sum(item.count_trainable(name) for item in micro_batches)) for name in components]
        num_ready, num_tokens, *counts = self._process.all_sum(local)
        if num_ready != self._process.world_size:
            # A rank without data cannot join the collectives of this update, so nobody starts it.
            assert num_ready == 0, (
                f"{num_ready:.0f} of {self._process.world_size} ranks have data for this step"
            )
            return None
        return _Counts(dict(zip(components, counts, strict=True)), int(num_tokens))

    def _update(self, batch: StepBatch, counts: _Counts) -> dict[str, float | int | None]:
        """Forward, backward, the finite check and the update; returns the metrics of the step."""
        lr_factor = self._schedule(self._state.schedule_step + 1)
        # A component without any token has no loss to divide.
        denominators = {name: max(1.0, count) for name, count in counts.denominators.items()}
        is_empty = not any(counts.denominators.values())
        with self._spans.span("forward_backward"):
            # Where nothing carries loss there will be no update, which an optimizer must know before
            # backward ends.
            sums = self._engine.forward_backward(
                batch.micro_batches, denominators, lr_factor=None if is_empty else lr_factor
            )
        with self._spans.span("update"):
            names = sorted(sums)
            reported = dict(zip(names, self._process.all_sum([sums[name] for name in names]), strict=True))
            grad_norm = self._engine.grad_norm()
            # Both numbers are global, so all ranks take the same branch.
            is_finite = math.isfinite(reported["loss"]) and math.isfinite(grad_norm)
            if is_finite and not is_empty:
                self._engine.update(lr_factor, grad_norm)
            else:
                self._skip(batch, is_empty=is_empty, loss=reported["loss"], grad_norm=grad_norm)
        self._state.advance(
            num_tokens=counts.num_tokens, num_samples=batch.num_samples, skipped=is_empty or not is_finite
        )
        return {
            **reported,
            **batch.metrics,
            **{f"tokens/{name}": count for name, count in counts.denominators.items()},
            "grad_norm": grad_norm,
            "lr_factor": lr_factor,
            "epoch": batch.epoch,
            "step_tokens": counts.num_tokens,
            "total_tokens": self._state.num_tokens,
            "total_samples": self._state.num_samples,
            "skipped_updates": self._state.num_skipped,
        }

    def _skip(self, batch: StepBatch, *, is_empty: bool, loss: float, grad_norm: float) -> None:
        self._engine.discard()
        step = self._state.step + 1
        if is_empty:
            logger.warning(
                "step %d: no token of its %d samples carries loss; update skipped", step, batch.num_samples
            )
            return
        message = f"step {step}: loss {loss} with gradient norm {grad_norm} is not finite"
        if self._on_non_finite == "stop":
            raise NonFiniteError(
                f"{message}; nothing of this update is saved. Lower optimizer.lr, or set "
                f"optimizer.on_non_finite = 'skip'"
            )
        logger.warning("%s; update skipped on all ranks", message)

    def _save_last(self) -> None:
        # The save in flight may be of an earlier step, whose figures would be lost among those of the last.
        self._report(self._checkpoint.poll(wait=True))
        self._report(self._checkpoint.save_if_due(self._state.step, last=True))

    def _report(self, values: Values | None) -> None:
        if values:
            self._reporter.report(self._state, values, None)

    def _run_hooks(self, event: Literal["before_training", "after_step", "finish"]) -> None:
        for hook in self._hooks:
            self._report(getattr(hook, event)(self._state))
