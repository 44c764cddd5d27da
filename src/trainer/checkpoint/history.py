"""The steps of one run: which are committed, which belong to a history that was left, which are deleted.

A step counts as committed when the storage says so after a write, never before. Deleted are only steps that
this run wrote or goes on from, and only after a newer one is committed.

When a run goes on from step N, steps after N belong to a history that is left. They stay until the new
history is saved for the first time, and are moved to `superseded/` just before that, so that they can never
be taken for its latest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from trainer.checkpoint.agreement import explain, on_all_ranks
from trainer.checkpoint.retention import steps_to_delete
from trainer.checkpoint.storage import Storage
from trainer.checkpoint.writer import SaveReport, check_room, format_bytes
from trainer.config.checkpoint import CheckpointConfig
from trainer.parallel.process import Process

logger = logging.getLogger(__name__)


class History:
    """What a run knows of its steps; the same on all ranks.

    Args:
        config: None deletes nothing.
        found: committed steps that lie in the storage.
    """

    def __init__(
        self, storage: Storage, process: Process, config: CheckpointConfig | None, found: Collection[int] = ()
    ) -> None:
        self._storage = storage
        self._process = process
        self._keep_last = None if config is None else config.keep_last
        self._keep_interval = None if config is None else config.keep_interval
        # Until something is loaded, this run starts at step 0 and every step found is of another history.
        self._superseded = set(found)
        self._committed: set[int] = set()
        # Also steps whose write failed: it may have failed after its commit, and then the step exists.
        self._own: set[int] = set()

    @classmethod
    def open(cls, storage: Storage, process: Process, config: CheckpointConfig, needed: int) -> History:
        """Make `storage` ready, and see which steps it holds; collective.

        Args:
            needed: bytes of one checkpoint.

        Raises:
            CheckpointError: it cannot be written, or has no room for one checkpoint.
        """

        def prepare() -> list[int]:
            storage.prepare()
            check_room(storage, needed)
            return [entry.step for entry in storage.scan() if entry.state == "committed"]

        found = on_all_ranks(
            process.control_group,
            f"checkpoints cannot be saved in {storage.describe()}",
            lambda: prepare() if process.is_main else [],
        )[0]
        free = storage.free_bytes()
        # One more than is kept, because an old step is deleted only after the new one is committed.
        copies = max(0, (config.keep_last or 0) + 1 - len(found))
        if process.is_main and free is not None and free < copies * needed:
            logger.warning(
                "%s has %s free; ckpt.keep_last = %s needs room for %d more checkpoints of %s",
                storage.describe(),
                format_bytes(free),
                config.keep_last,
                copies,
                format_bytes(needed),
            )
        return cls(storage, process, config, found)

    @property
    def own(self) -> frozenset[int]:
        """Steps that this run wrote, tried to write, or goes on from: no others are deleted."""
        return frozenset(self._own)

    def holds(self, step: int) -> bool:
        """Whether `step` is committed, and is kept."""
        return step in self._committed

    def go_on_from(self, step: int | None) -> None:
        """Steps up to this one are ancestors; None if it lies elsewhere: then none of these is."""
        known = self._committed | self._superseded
        self._committed = {other for other in known if step is not None and other <= step}
        self._own = set(self._committed)
        self._superseded = known - self._committed

    def begin(self, step: int) -> None:
        """A write of `step` begins."""
        self._own.add(step)

    def leave_old(self) -> None:
        """Before the first write of a new history: a kill in between must not make the old one latest again.
        Part of the write: on its thread and in its group. Can be repeated after it has failed half-way.

        Raises:
            CheckpointError: a step cannot be moved; it would be taken for the latest later.
        """
        if not self._superseded:
            return

        def move() -> None:
            if self._process.is_main:
                for step in sorted(self._superseded):
                    place = self._storage.set_aside(step)
                    if place is not None:
                        logger.warning(
                            "step %d is of the history before this resume, and lies aside now: %s",
                            step,
                            place,
                        )

        what = "checkpoints of the history that this run left cannot be moved out of the way"
        on_all_ranks(self._process.background_group, what, move)
        self._superseded = set()

    def prune(self, report: SaveReport) -> None:
        """Delete what the commit of `report` makes superfluous; on the coordinator, after it. A step that
        cannot be deleted costs room, no more than that, and the next save tries again.
        """
        for step in self._outdated(report):
            try:
                self._storage.remove(step)
            except Exception as error:
                logger.warning(
                    "step %d is not kept any more, but cannot be deleted: %s", step, explain(error)
                )

    def take(self, report: SaveReport) -> None:
        """A write has ended well, on every rank."""
        found = self._committed | {report.step} if report.committed is None else set(report.committed)
        self._committed = found - set(self._outdated(report))

    def _outdated(self, report: SaveReport) -> list[int]:
        return steps_to_delete(
            report.committed or (), self._keep_last, self._keep_interval, protect=(report.step,)
        )
