"""The one object of the trainer that saves and loads the state of training.

Owns when a save happens, the save in flight, and which steps this run knows. A step is known after its
commit, never before; pruning acts on known steps only, after a newer one is committed. All public methods are
collective: every rank calls them in the same order, and an error is raised on every rank.

When a run goes on from step N, steps after N belong to a history that is left. They stay until the new
history is saved for the first time, and are moved to `superseded/` just before that, so that they can never
be taken for its latest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from contract.errors import CheckpointError
from contract.layout import RunFolder
from trainer.checkpoint import rng
from trainer.checkpoint.agreement import on_all_ranks
from trainer.checkpoint.base import Part, Snapshot, part_tensors
from trainer.checkpoint.inflight import InFlight
from trainer.checkpoint.reader import load_step
from trainer.checkpoint.resume import SKIP_FLAGS, ResumePlan, state_config
from trainer.checkpoint.retention import steps_to_delete
from trainer.checkpoint.snapshot import SnapshotBuffers, refer
from trainer.checkpoint.storage import COMPONENT, LocalStorage, Storage
from trainer.checkpoint.writer import SaveReport, bytes_needed, check_room, format_bytes, write_snapshot
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
        components: tuple[str, ...] = (COMPONENT,),
    ) -> None:
        """Look at the folder, and clear away what dead attempts left half-written.

        Args:
            config: None saves nothing (`load` works all the same) and leaves the folder alone.
            parts: by name; the one called `model` must be finite in every save.
            resolved_config: JSON values; stored in every step.
            state_owners: told of every save that reads their host memory by reference.
            is_state_on_host: whether the optimizer's state lives there; `ckpt.async_save` applies only then.
            components: processes whose state must be in a step for it to be committed.

        Raises:
            CheckpointError: the folder cannot be written, or has no room for one checkpoint.
        """
        self._config = config
        self._process = process
        self._parts = parts
        self._resolved_config = state_config(resolved_config)
        self._components = components
        self._folder = folder
        self._storage: Storage = LocalStorage(folder.checkpoints)
        self._state_owners = state_owners
        self._is_async = config is not None and config.async_save and is_state_on_host
        aside_bytes = 0 if config is None else int(config.async_buffer_gib * 2**30)
        self._buffers = SnapshotBuffers(process.device, aside_bytes)
        self._hold: Hold | None = None
        self._in_flight = InFlight()
        self._num_failed = 0
        known = [] if config is None else self._open_folder(config)
        # Until something is loaded, this run starts at step 0 and every step found is of another history.
        self._committed: set[int] = set()
        self._superseded: set[int] = set(known)

    def poll(self) -> dict[str, float]:
        """At the start of a step: see whether the save in flight has ended, on all ranks together.

        Returns:
            Metrics of a save that ended in the background since the last call; empty if there is none.

        Raises:
            CheckpointError: it has failed, and `ckpt.on_failure` is "stop".
        """
        if not self._in_flight.is_open:
            return {}
        num_done, num_failed = self._process.all_sum(
            [float(self._in_flight.is_done), float(self._in_flight.has_failed)]
        )
        # A failure on one rank is a failure on all of them, a moment later: nobody may go on without the
        # others.
        if num_failed or num_done == self._process.world_size:
            return self._settle()
        return {}

    def save_if_due(self, step: int, *, last: bool) -> dict[str, float] | None:
        """Save at every `ckpt.interval`, and at the `last` step; a committed step is not saved again.

        The last save is awaited, and its failure is raised whatever `ckpt.on_failure` says.

        Returns:
            Metrics, among them `time/save_ckpt`: the seconds for which the step was blocked; None if there
            was nothing to save.

        Raises:
            CheckpointError: this save or the one before it failed.
        """
        if self._config is None:
            return None
        due = last or (self._config.interval is not None and step % self._config.interval == 0)
        if not due:
            return None
        start = time.perf_counter()
        values = self._settle()
        if step not in self._committed:
            self.save(step)
            if last or not self._is_async:
                values |= self._settle(must_succeed=last)
        elif not values:
            return None
        return {**values, "time/save_ckpt": time.perf_counter() - start}

    def save(self, step: int) -> Future[SaveReport]:
        """Begin to save `step`, whether due or not; in asynchronous mode the write goes on behind the
        training step.

        The save before must have been awaited. The run must have `ckpt`.

        Raises:
            CheckpointError: steps of a history that was left cannot be moved away.
        """
        config = self._config
        assert config is not None, "this run saves no checkpoints"
        self._leave_old_history()
        generators = {f"{rng.PREFIX}{self._process.rank}": rng.capture(self._process.device)}
        if self._is_async:
            snapshot = self._buffers.take(
                step,
                self._parts,
                generators,
                self._resolved_config,
                timeout_seconds=config.write_timeout_seconds,
            )
        else:
            snapshot = refer(step, self._parts, generators, self._resolved_config)
        self._hold = snapshot.hold
        future = self._in_flight.start(lambda: self._write(snapshot, config), in_background=self._is_async)
        if snapshot.hold is not None:
            for owner in self._state_owners:
                owner.hold_state_updates(snapshot.hold)
        return future

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the save in flight, and log it.

        Raises:
            CheckpointError: it failed.
            TimeoutError: it did not end in time.
        """
        self._settle(must_succeed=True, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Finish the save in flight, or give it up after `ckpt.write_timeout_seconds`; a step that was not
        committed then never will be.

        Raises:
            CheckpointError: it failed, or did not end.
        """
        if self._config is None:
            return
        try:
            self.wait(self._config.write_timeout_seconds)
        except TimeoutError:
            raise CheckpointError(
                f"the checkpoint in flight did not end within {self._config.write_timeout_seconds:g} s and "
                f"was given up; "
                f"earlier ones are unchanged"
            ) from None

    def _write(self, snapshot: Snapshot, config: CheckpointConfig) -> SaveReport:
        """The write, on whichever thread it runs."""
        try:
            report = write_snapshot(
                self._storage,
                snapshot,
                self._process.background_group,
                threads=config.writer_threads,
                checksums=config.checksums,
                components=self._components,
            )
        finally:
            if snapshot.hold is not None:
                snapshot.hold.finish()
        if self._process.is_main:
            self._remove(self._outdated(snapshot.step, config))
        return report

    def _settle(
        self, *, must_succeed: bool = False, timeout_seconds: float | None = None
    ) -> dict[str, float]:
        """Take the save in flight, if there is one: wait for it, log it, know its step; returns its
        metrics.
        """
        assert self._config is not None or not self._in_flight.is_open
        try:
            report = self._in_flight.take(timeout_seconds)
        except CheckpointError as error:
            self._num_failed += 1
            if must_succeed or self._config is None or self._config.on_failure == "stop":
                raise
            if self._process.is_main:
                logger.warning("%s; the run goes on, as ckpt.on_failure = 'warn'", error)
            return {"checkpoint/failed_saves": float(self._num_failed)}
        if report is None:
            return {}
        assert self._config is not None
        self._committed = (self._committed | {report.step}) - set(self._outdated(report.step, self._config))
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

        The random generators go with `progress`: a run that counts from 0 keeps its own.

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
        start_step = plan.step if with_progress else 0
        known = self._committed | self._superseded
        # Steps of this folder are ancestors only if the run goes on from one of them.
        is_own = plan.path.parent.resolve() == self._folder.checkpoints.resolve()
        self._committed = {step for step in known if is_own and step <= start_step}
        self._superseded = known - self._committed

    def _outdated(self, step: int, config: CheckpointConfig) -> list[int]:
        """Steps that the commit of `step` makes superfluous."""
        known = self._committed | {step}
        return steps_to_delete(known, config.keep_last, config.keep_interval, protect=(step,))

    def _leave_old_history(self) -> None:
        """Before the first save of a new history: a kill in between must not make the old one latest again.

        Raises:
            CheckpointError: a step cannot be moved; it would be taken for the latest later.
        """
        if not self._superseded:
            return

        def move() -> None:
            if self._process.is_main:
                for step in sorted(self._superseded):
                    place = self._storage.set_aside(step)
                    logger.warning(
                        "step %d is of the history before this resume, and was moved to %s", step, place
                    )

        what = "checkpoints of the history that this run left cannot be moved out of the way"
        on_all_ranks(self._process.control_group, what, move)
        self._superseded = set()

    def _remove(self, outdated: list[int]) -> None:
        """Only after a commit. A step that cannot be deleted costs room, no more than that."""
        for step in outdated:
            try:
                self._storage.remove(step)
            except OSError as error:
                logger.warning("step %d is not kept any more, but cannot be deleted: %s", step, error)

    def _open_folder(self, config: CheckpointConfig) -> list[int]:
        needed = bytes_needed(part_tensors(self._parts))

        def open_folder() -> list[int]:
            self._storage.prepare()
            check_room(self._storage, needed)
            return [entry.step for entry in self._storage.scan() if entry.state == "committed"]

        known = on_all_ranks(
            self._process.control_group,
            f"checkpoints cannot be saved in {self._storage.describe()}",
            lambda: open_folder() if self._process.is_main else [],
        )[0]
        free = self._storage.free_bytes()
        # One more than is kept, because an old step is deleted only after the new one is committed.
        copies = max(0, (config.keep_last or 0) + 1 - len(known))
        if self._process.is_main and free is not None and free < copies * needed:
            logger.warning(
                "%s has %s free; ckpt.keep_last = %s needs room for %d more checkpoints of %s",
                self._storage.describe(),
                format_bytes(free),
                config.keep_last,
                copies,
                format_bytes(needed),
            )
        return known
