"""The loop among fakes that record what is asked of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contract.batch import MicroBatch, StepBatch, build_micro_batch
from contract.errors import CheckpointError, PublishError
from tests.support.engine import ListSource, sample
from trainer.loop import Loop
from trainer.parallel.stop import Decision
from trainer.source.base import PENDING, Pending
from trainer.state import TrainState


def row(num_prompt: int = 1) -> MicroBatch:
    """Four tokens; those after the prompt carry loss."""
    return build_micro_batch([[sample([5, 6, 7, 8], num_prompt)]])


def batch(*rows: MicroBatch, epoch: float = 0.5) -> StepBatch:
    return StepBatch(rows or (row(),), max(1, len(rows)), epoch, {"data/dropped": 2.0})


class FakeProcess:
    """A group of `world_size` ranks that all report what this one does."""

    is_main = True

    def __init__(self, log: list[Any], world_size: int = 1) -> None:
        self.log = log
        self.world_size = world_size

    def all_sum(self, values: list[float]) -> list[float]:
        self.log.append("all_sum")
        return [self.world_size * value for value in values]


class FakeRequests:
    """Answers the n-th question with the n-th decision, and then that the run goes on."""

    def __init__(self, log: list[Any], decisions: Sequence[Decision] = ()) -> None:
        self.log = log
        self.decisions = list(decisions)
        self.steps: list[int] = []
        self.decided = Decision()

    def arm(self) -> None:
        self.log.append("arm")

    def decide(self, process: Any, step: int) -> Decision:
        self.steps.append(step)
        self.decided = self.decisions.pop(0) if self.decisions else Decision()
        return self.decided


class FakeEngine:
    """Reports losses as given, and remembers the factor of every update."""

    components = ("ce",)

    def __init__(self, log: list[Any], losses: Sequence[float] = (), norms: Sequence[float] = ()) -> None:
        self.log = log
        self.losses = list(losses)
        self.norms = list(norms)
        self.factors: list[float] = []
        self.announced: list[float | None] = []
        self.denominators: list[dict[str, float]] = []

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        *,
        lr_factor: float | None,
    ) -> dict[str, float]:
        self.log.append("forward_backward")
        self.announced.append(lr_factor)
        self.denominators.append(dict(denominators))
        return {"loss": self.losses.pop(0) if self.losses else 1.0}

    def grad_norm(self) -> float:
        self.log.append("grad_norm")
        return self.norms.pop(0) if self.norms else 2.0

    def update(self, lr_factor: float, grad_norm: float) -> None:
        self.log.append("update")
        self.factors.append(lr_factor)

    def discard(self) -> None:
        self.log.append("discard")


class FakeCheckpoint:
    """Saves every `interval` steps, when asked, and the last; a step that is saved is not saved again. A save
    before the last is in flight until someone waits for it.
    """

    def __init__(self, log: list[Any], interval: int | None = None) -> None:
        self.log = log
        self.interval = interval
        self.saved: list[int] = []
        self.in_flight: int | None = None
        self.error: CheckpointError | None = None

    def poll(self, *, wait: bool = False) -> dict[str, float]:
        self.log.append("await" if wait else "poll")
        if self.error is not None:
            raise self.error
        return self._take() if wait else {}

    def save_if_due(self, step: int, *, last: bool = False, now: bool = False) -> dict[str, float] | None:
        self.log.append("save_last" if last else "save_now" if now else "save_if_due")
        due = last or now or (self.interval is not None and step % self.interval == 0)
        if not due or step in self.saved:
            return None
        self.saved.append(step)
        values = self._take()
        self.in_flight = step
        return {**values, **(self._take() if last else {}), "time/save_ckpt": 0.25}

    def _take(self) -> dict[str, float]:
        step, self.in_flight = self.in_flight, None
        return {} if step is None else {"checkpoint/step": float(step)}


class FakeHook:
    """Notes every call with the step that was reached."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log = log
        self.name = name
        self.on_finish: Callable[[], object] = lambda: None

    def _note(self, event: str, state: TrainState) -> Mapping[str, float]:
        self.log.append(f"{self.name}.{event}")
        return {f"{self.name}/{event}": float(state.step)}

    def before_training(self, state: TrainState) -> Mapping[str, float]:
        return self._note("before_training", state)

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        return self._note("after_step", state)

    def finish(self, state: TrainState) -> Mapping[str, float]:
        self.on_finish()
        return self._note("finish", state)

    def close(self) -> None:
        raise AssertionError("whoever opened a hook closes it")


class FakeReporter:
    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.steps: list[dict[str, Any]] = []
        self.beside: list[dict[str, Any]] = []

    def report(self, state: TrainState, values: Mapping[str, Any], batch: StepBatch | None) -> None:
        self.log.append("report")
        (self.beside if batch is None else self.steps).append({"step": state.step, **values})


class FakePublisher:
    """Notes the version of every publication; `failing` is one that reaches nobody."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.versions: list[int] = []
        self.failing: int | None = None

    def publish(self, version: int) -> Mapping[str, float]:
        self.log.append("publish")
        if version == self.failing:
            raise PublishError("the server does not answer")
        self.versions.append(version)
        return {"time/publish": 0.5}

    def close(self) -> None:
        raise AssertionError("whoever opened a publisher closes it")


class LoggingSource(ListSource):
    """Hands out no batch before it was asked for it `num_pending` times in vain."""

    def __init__(self, log: list[Any], batches: Sequence[StepBatch | None]) -> None:
        super().__init__(batches)
        self.log = log
        self.num_pending = 0
        self.seconds = 0.0
        self._num_asked = 0

    def next_step(self) -> StepBatch | Pending | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.log.append("next_step")
        time.sleep(self.seconds)
        self._num_asked += 1
        if self._num_asked <= self.num_pending:
            return PENDING
        self._num_asked = 0
        return super().next_step()


class Rig:
    """A loop among fakes."""

    def __init__(
        self,
        batches: Sequence[StepBatch | None],
        *,
        total_steps: int = 10**6,
        losses: Sequence[float] = (),
        norms: Sequence[float] = (),
        interval: int | None = None,
        decisions: Sequence[Decision] = (),
        on_non_finite: str = "skip",
        state: TrainState | None = None,
        world_size: int = 1,
        process: Any = None,
    ) -> None:
        self.log: list[Any] = []
        self.engine = FakeEngine(self.log, losses, norms)
        self.checkpoint = FakeCheckpoint(self.log, interval)
        self.reporter = FakeReporter(self.log)
        self.state = state or TrainState()
        self.requests = FakeRequests(self.log, decisions)
        self.source = LoggingSource(self.log, batches)
        self.publisher = FakePublisher(self.log)
        self.hooks = [FakeHook(self.log, "a"), FakeHook(self.log, "b")]
        parts: dict[str, Any] = {
            "process": process or FakeProcess(self.log, world_size),
            "engine": self.engine,
            "source": self.source,
            "publisher": self.publisher,
            "checkpoint": self.checkpoint,
            "hooks": self.hooks,
            "reporter": self.reporter,
            "requests": self.requests,
            "state": self.state,
            "schedule": lambda n: 1.0 / n,
            "total_steps": total_steps,
            "on_non_finite": on_non_finite,
        }
        self.loop = Loop(**parts)
