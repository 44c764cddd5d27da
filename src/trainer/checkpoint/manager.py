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
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from contract.errors import CheckpointError
from contract.layout import RunFolder
from trainer.checkpoint import rng
from trainer.checkpoint.agreement import on_all_ranks
from trainer.checkpoint.base import Part, part_tensors, take_snapshot
from trainer.checkpoint.inflight import InFlight
from trainer.checkpoint.reader import load_step
from trainer.checkpoint.resume import SKIP_FLAGS, ResumePlan, state_config
from trainer.checkpoint.retention import steps_to_delete
from trainer.checkpoint.storage import COMPONENT, LocalStorage, Storage
from trainer.checkpoint.writer import SaveReport, bytes_needed, check_room, format_bytes, write_snapshot
from trainer.config.checkpoint import CheckpointConfig
from trainer.parallel.process import Process

logger = logging.getLogger(__name__)


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
        components: tuple[str, ...] = (COMPONENT,),
    ) -> None:
        """Look at the folder, and clear away what dead attempts left half-written.

        Args:
            config: None saves nothing (`load` works all the same) and leaves the folder alone.
            parts: by name; the one called `model` must be finite in every save.
            resolved_config: JSON values; stored in every step.
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
        self._in_flight = InFlight()
        known = [] if config is None else self._open_folder(config)
        # Until something is loaded, this run starts at step 0 and every step found is of another history.
        self._committed: set[int] = set()
        self._superseded: set[int] = set(known)

    def raise_if_failed(self) -> None:
        """Raise the error of a save that has failed since the last call.

        Raises:
            CheckpointError: the save in flight has failed.
        """
        if self._in_flight.has_failed():
            self.wait()

    def save_if_due(self, step: int, *, last: bool) -> float | None:
        """Save at every `ckpt.interval`, and at the `last` step; a committed step is not saved again.

        Returns:
            Seconds for which the training step was blocked; None if there was nothing to save.

        Raises:
            CheckpointError: this save or the one before it failed.
        """
        if self._config is None:
            return None
        due = last or (self._config.interval is not None and step % self._config.interval == 0)
        return self.save(step) if due else None

    def save(self, step: int) -> float | None:
        """Save now, whether due or not; for the result see `save_if_due`. The run must have `ckpt`.

        Raises:
            CheckpointError: this save or the one before it failed, or a weight is not finite.
        """
        config = self._config
        assert config is not None, "this run saves no checkpoints"
        start = time.perf_counter()
        self.wait()
        if step in self._committed:
            return None
        self._refuse_non_finite(step)
        self._leave_old_history()
        generators = {f"{rng.PREFIX}{self._process.rank}": rng.capture(self._process.device)}
        snapshot = take_snapshot(step, self._parts, generators, self._resolved_config)
        outdated = self._outdated(step, config)

        def write() -> SaveReport:
            report = write_snapshot(
                self._storage,
                snapshot,
                self._process.background_group,
                threads=config.writer_threads,
                checksums=config.checksums,
                components=self._components,
            )
            if self._process.is_main:
                self._remove(outdated)
            return report

        self._in_flight.start(write)
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait for the save in flight, and log it.

        Raises:
            CheckpointError: it failed.
        """
        report = self._in_flight.take()
        if report is None:
            return
        assert self._config is not None
        self._committed = (self._committed | {report.step}) - set(self._outdated(report.step, self._config))
        if self._process.is_main:
            logger.info(
                "saved step %d: %s in %.1f s (%.0f MB/s)",
                report.step,
                format_bytes(report.num_bytes),
                report.write_seconds,
                report.num_bytes / max(report.write_seconds, 1e-9) / 1e6,
            )

    def close(self) -> None:
        """Finish the save in flight.

        Raises:
            CheckpointError: it failed.
        """
        self.wait()

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

    def _refuse_non_finite(self, step: int) -> None:
        def check() -> None:
            bad = []
            for name, tensor in self._parts["model"].tensors().items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if local.is_floating_point() and not bool(torch.isfinite(local).all()):
                    bad.append(name)
            if bad:
                raise CheckpointError(f"{len(bad)} weights hold NaN or infinity, the first is {bad[0]}")

        what = f"checkpoint of step {step} was not saved, earlier ones are unchanged"
        on_all_ranks(self._process.control_group, what, check)

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
