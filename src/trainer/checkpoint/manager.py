"""The one object of the trainer that saves and loads the state of training.

Owns when a save happens and the save in flight; which steps there are is the business of its `History`. All
public methods but `close` are collective: every rank calls them in the same order, and an error is raised on
every rank.

A write in the background uses the background group alone, and the training thread the control group alone:
they never meet in a collective. A collective that has timed out leaves its group unusable for good, so the
save after a failed one begins with a new background group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from contract.errors import CheckpointError
from contract.layout import RunFolder
from trainer.checkpoint import rng
from trainer.checkpoint.agreement import on_all_ranks
from trainer.checkpoint.base import Companion, Part, Snapshot, part_tensors
from trainer.checkpoint.history import History
from trainer.checkpoint.inflight import InFlight
from trainer.checkpoint.reader import load_companions, load_step
from trainer.checkpoint.resume import SKIP_FLAGS, ResumePlan, state_config
from trainer.checkpoint.snapshot import SnapshotBuffers, refer
from trainer.checkpoint.storage import Storage, open_storage
from trainer.checkpoint.writer import (
    WEIGHTS_PREFIX,
    SaveReport,
    bytes_needed,
    format_bytes,
    write_snapshot,
)
from trainer.config.checkpoint import CheckpointConfig
from trainer.hold import Hold
from trainer.parallel.process import Process

logger = logging.getLogger(__name__)


class StateOwner(Protocol):
    """Owns state on the host that saves read by reference (an optimizer)."""

    def hold_state_updates(self, hold: Hold) -> None:
        """Change none of it in place before `hold` lets go of it."""
        ...


class CheckpointManager:
    """Saves the parts of a run into its folder, and loads them; at most one save is in flight."""

    def __init__(
        self,
        config: CheckpointConfig | None,
        folder: RunFolder,
        process: Process,
        parts: Mapping[str, Part],
        resolved_config: Mapping[str, Any],
        *,
        state_owners: Sequence[StateOwner] = (),
        is_state_on_host: bool = False,
        model_buffers: Collection[str] = (),
        companions: Mapping[str, Companion] | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Look at the folder, and clear away what dead attempts left half-written.

        Args:
            config: None saves nothing (`load` works all the same) and leaves the folder alone.
            parts: by name; the tensors of the one called `model` must be finite in every save.
            resolved_config: JSON values; stored in every step.
            state_owners: told of every save that reads their host memory by reference.
            is_state_on_host: whether the optimizer's state lives there; `ckpt.async_save` applies only then.
            model_buffers: names of tensors of part `model` that may hold infinity all the same: they are no
                parameters.
            companions: state of other processes that is saved in every step, by component.
            storage: where steps lie; None is what `folder` says.

        Raises:
            CheckpointError: the folder cannot be written, or has no room for one checkpoint.
        """
        self._config = config
        self._process = process
        self._parts = parts
        self._resolved_config = state_config(resolved_config)
        self._companions = dict(companions or {})
        self._folder = folder
        self._may_be_infinite = frozenset(f"{WEIGHTS_PREFIX}{name}" for name in model_buffers)
        self._storage = storage or open_storage(folder.steps, process.world_size)
        self._state_owners = state_owners
        self._is_async = config is not None and config.async_save and is_state_on_host
        aside_bytes = 0 if config is None else int(config.async_buffer_gib * 2**30)
        self._buffers = SnapshotBuffers(process.device, aside_bytes)
        self._hold: Hold | None = None
        self._in_flight = InFlight(process)
        self._num_failed = 0
        if config is not None and config.async_save and not is_state_on_host and process.is_main:
            logger.info(
                "ckpt.async_save has no effect with model.offload = 'none': saves are synchronous; set "
                "model.offload = 'optimizer' or 'full' to save behind the training step"
            )
        if config is None:
            self._history = History(self._storage, process, None)
        else:
            needed = bytes_needed(part_tensors(parts))
            self._history = History.open(self._storage, process, config, needed)

    def poll(self, *, wait: bool = False) -> dict[str, float]:
        """At the start of a step: see whether the save in flight has ended, on all ranks together.

        Args:
            wait: for its end; at the end of a run, so that its metrics are not lost among the last save's.

        Returns:
            Metrics of a save that ended in the background since the last call; empty if there is none.

        Raises:
            CheckpointError: it has failed on some rank, and `ckpt.on_failure` is "stop".
        """
        wait_seconds = self._config.write_timeout_seconds if wait and self._config is not None else 0.0
        return self._settle(wait_seconds)

    def save_if_due(self, step: int, *, last: bool = False, now: bool = False) -> dict[str, float] | None:
        """Save at every `ckpt.interval`, at the `last` step, and when it is asked for (`now`); a committed
        step is not saved again.

        A last save is awaited, and its failure is raised whatever `ckpt.on_failure` says.

        Returns:
            Metrics, among them `time/save_ckpt`: the seconds for which the step was blocked; None if there
            was nothing to save.

        Raises:
            CheckpointError: this save or the one before it failed.
        """
        config = self._config
        if config is None:
            return None
        if not (last or now or (config.interval is not None and step % config.interval == 0)):
            return None
        start = time.perf_counter()
        values = self._settle(config.write_timeout_seconds)
        if not self._history.holds(step):
            try:
                self.save(step)
            except CheckpointError as error:
                values |= self._fail(error, must_succeed=last)
            else:
                if last or not self._is_async:
                    values |= self._settle(config.write_timeout_seconds, must_succeed=last)
        elif not values:
            return None
        return {**values, "time/save_ckpt": time.perf_counter() - start}

    def save(self, step: int) -> Future[SaveReport]:
        """Begin to save `step`, whether due or not, after the save before it has ended; in asynchronous mode
        the write goes on behind the training step. The run must have `ckpt`.

        Returns:
            This rank's end of the write. `poll` and the others take it for all ranks.

        Raises:
            CheckpointError: a write that was given up has still not ended; or there is no memory for the
                snapshot on some rank.
        """
        config = self._config
        assert config is not None, "this run saves no checkpoints"
        self._settle(config.write_timeout_seconds)
        if self._in_flight.is_open:
            # Its thread may read the buffers that this save would fill.
            raise CheckpointError(
                f"checkpoint of step {step} was not saved: an earlier write, which was given up, still hangs "
                f"in {self._storage.describe()}"
            )
        what = f"checkpoint of step {step} was not saved, earlier ones are unchanged"
        self._in_flight.renew_group(what)
        taken: list[Snapshot] = []
        # The ranks must agree before any of them enters the write: memory may be short on one of them alone.
        on_all_ranks(self._process.control_group, what, lambda: taken.append(self._take(step, config)))
        (snapshot,) = taken
        self._hold = snapshot.hold
        if snapshot.hold is not None:
            for owner in self._state_owners:
                owner.hold_state_updates(snapshot.hold)
        self._history.begin(step)
        return self._in_flight.start(
            step, lambda: self._write(snapshot, config), snapshot.hold, in_background=self._is_async
        )

    def wait(self) -> dict[str, float]:
        """Wait for the save in flight; returns its metrics, empty if there is none.

        Raises:
            CheckpointError: it failed, or did not end within `ckpt.write_timeout_seconds`.
        """
        if self._config is None:
            return {}
        return self._settle(self._config.write_timeout_seconds, must_succeed=True)

    def close(self) -> None:
        """Finish the save in flight, or give it up after `ckpt.write_timeout_seconds`: from then on its step
        is committed only if this process lives on, and the write had read all that it needed before. Not
        collective: the other ranks may be anywhere, or gone.

        Raises:
            CheckpointError: it failed, or did not end.
        """
        if self._config is None:
            return
        outcome = self._in_flight.settle_alone(self._config.write_timeout_seconds)
        if isinstance(outcome, CheckpointError):
            raise outcome
        if outcome is not None:
            self._note(outcome)

    def __enter__(self) -> CheckpointManager:
        """`close` at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close`; what fails there is only logged if something else has failed before."""
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)

    def _take(self, step: int, config: CheckpointConfig) -> Snapshot:
        generators = {f"{rng.PREFIX}{self._process.rank}": rng.capture(self._process.device)}
        companions = {name: companion.content() for name, companion in self._companions.items()}
        if not self._is_async:
            snapshot = refer(step, self._parts, generators, self._resolved_config)
            return replace(snapshot, companions=companions)
        seconds = config.write_timeout_seconds
        if self._process.world_size > 1:
            # While this rank's optimizer waits for the write, the others may wait for this rank in a
            # collective: they must not be the first to lose patience.
            seconds = min(seconds, self._process.timeout.total_seconds() / 2)
        snapshot = self._buffers.take(
            step,
            self._parts,
            generators,
            self._resolved_config,
            timeout_seconds=seconds,
            on_timeout="raise" if config.on_failure == "stop" else "give_up",
        )
        return replace(snapshot, companions=companions)

    def _write(self, snapshot: Snapshot, config: CheckpointConfig) -> SaveReport:
        """The write, on whichever thread it runs."""
        try:
            self._history.leave_old()
            report = write_snapshot(
                self._storage,
                snapshot,
                self._process.background_group,
                threads=config.writer_threads,
                checksums=config.checksums,
                own_steps=self._history.own,
                may_be_infinite=self._may_be_infinite,
            )
        finally:
            if snapshot.hold is not None:
                snapshot.hold.finish()
        if self._process.is_main:
            self._history.prune(report)
        return report

    def _settle(self, wait_seconds: float = 0.0, *, must_succeed: bool = False) -> dict[str, float]:
        """Take the save in flight if it ends on all ranks within `wait_seconds`; returns its metrics."""
        outcome = self._in_flight.settle(wait_seconds)
        if isinstance(outcome, CheckpointError):
            return self._fail(outcome, must_succeed=must_succeed)
        return {} if outcome is None else self._note(outcome)

    def _fail(self, error: CheckpointError, *, must_succeed: bool) -> dict[str, float]:
        self._num_failed += 1
        if must_succeed or self._config is None or self._config.on_failure == "stop":
            raise error
        if self._process.is_main:
            logger.warning("%s; the run goes on, as ckpt.on_failure = 'warn'", error)
        return {"checkpoint/failed_saves": float(self._num_failed)}

    def _note(self, report: SaveReport) -> dict[str, float]:
        """Know the step of `report`, and log it; returns its metrics."""
        self._history.take(report)
        rate = report.num_bytes / max(report.write_seconds, 1e-9) / 1e6
        if self._process.is_main:
            logger.info(
                "saved step %d: %s in %.1f s (%.0f MB/s)",
                report.step,
                format_bytes(report.num_bytes),
                report.write_seconds,
                rate,
            )
        values = {
            "checkpoint/step": float(report.step),
            "checkpoint/write_seconds": report.write_seconds,
            "checkpoint/bytes": float(report.num_bytes),
            "checkpoint/write_mb_per_s": rate,
        }
        if self._hold is not None:
            values["checkpoint/hold_seconds"] = self._hold.statistics.wait_seconds
            values["checkpoint/copied_aside_bytes"] = float(self._hold.statistics.copied_bytes)
        return values

    def load(self, plan: ResumePlan) -> None:
        """Fill the parts from the step that `plan` names, all but those it skips; before the first step.

        The random generators go with `progress`: a run that counts from 0 keeps its own. Companions go with
        `data`.

        Raises:
            CheckpointError: the step is damaged or does not fit this run.
        """
        parts = {name: part for name, part in self._parts.items() if name not in plan.skipped}
        for name in [name for name in parts if name not in plan.saved_parts]:
            flag = SKIP_FLAGS.get(name)
            if flag is not None or name == "model":
                hint = f"; set resume.{flag} to start it afresh" if flag else ""
                raise CheckpointError(f"{plan.path} holds no state of the {name}{hint}")
            if self._process.is_main:
                logger.warning("%s holds no state of the %s, which starts afresh", plan.path, name)
            del parts[name]
        with_progress = "progress" not in plan.skipped
        load_step(plan.path, plan.record, parts, self._process, with_rng=with_progress)
        if "data" not in plan.skipped:
            load_companions(plan.path, self._companions, self._process)
        # Steps of this folder are ancestors only if the run goes on from one of them.
        is_own = plan.path.parent.resolve() == self._folder.steps.resolve()
        start_step = plan.step if with_progress else 0
        self._history.go_on_from(start_step if is_own else None)
