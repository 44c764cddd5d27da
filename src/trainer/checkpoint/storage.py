"""Where the steps of a run lie: one interface, its implementation on a local (or mounted) file system, and
the choice between that and an object store.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader

from contract import commit
from contract.errors import CheckpointError
from contract.record import CommitRecord, FileRecord, StepEntry, format_checksum
from contract.store import Folder, StoreFolder, check_installed, read_bytes
from trainer.checkpoint.storage_store import StoreReader, StoreStorage
from trainer.checkpoint.tensor_writer import LocalFiles, TensorWriter

logger = logging.getLogger(__name__)

COMPONENT = "trainer"
"""The folder inside a step that the trainer writes."""


class Storage(Protocol):
    """The steps of one run. Only the coordinator begins, commits and removes; every rank writes tensors."""

    def describe(self) -> str:
        """Where this is, for messages."""
        ...

    def prepare(self) -> None:
        """Make the place exist and see that it can be written; remove what dead attempts left half-written.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def scan(self) -> list[StepEntry]:
        """All steps, ascending."""
        ...

    def free_bytes(self) -> int | None:
        """Room that is left, or None if that has no limit or cannot be known."""
        ...

    def begin(self, step: int) -> None:
        """Open an empty space for the files of `step`; an older attempt at it is removed."""
        ...

    def tensor_writer(self, step: int, *, threads: int, checksums: bool) -> TensorWriter:
        """A DCP writer of this rank's share of the tensors of `step`."""
        ...

    def write_file(
        self, step: int, name: str, content: bytes, component: str = COMPONENT
    ) -> dict[str, FileRecord]:
        """Write one durable file of `component`; returns its record by its name inside the step."""
        ...

    def commit(self, step: int, record: CommitRecord) -> None:
        """Make `step` exist. A committed step of that number, from a history that was left, is set aside."""
        ...

    def discard(self, step: int) -> None:
        """Remove what was written of `step`, which is not committed."""
        ...

    def remove(self, step: int) -> None:
        """Delete a committed step; one that is gone already is no error."""
        ...

    def set_aside(self, step: int) -> str | None:
        """Take a committed step out of the list without deleting it; returns where it lies now, or None if
        there is no such step (any more).
        """
        ...


class LocalStorage:
    """Steps as folders `step_N` of `checkpoints`."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints

    def describe(self) -> str:
        return str(self._checkpoints)

    def prepare(self) -> None:
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self._checkpoints).close()
        # The run that owns the folder is starting, so nothing in it can be in the middle of being written.
        for entry in self.scan():
            if entry.path.name.endswith(commit.PARTIAL_SUFFIX):
                commit.remove_step(entry.path)

    def scan(self) -> list[StepEntry]:
        return commit.scan(self._checkpoints)

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self._checkpoints).free

    def begin(self, step: int) -> None:
        partial = self._partial(step)
        if partial.exists():
            commit.remove_step(partial)
        (partial / COMPONENT).mkdir(parents=True)

    def tensor_writer(self, step: int, *, threads: int, checksums: bool) -> TensorWriter:
        return TensorWriter(
            self._partial(step) / COMPONENT,
            LocalFiles(),
            folder_name=COMPONENT,
            threads=threads,
            checksums=checksums,
        )

    def write_file(
        self, step: int, name: str, content: bytes, component: str = COMPONENT
    ) -> dict[str, FileRecord]:
        path = self._partial(step) / component / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        commit.fsync(path)
        checksum = format_checksum(xxhash.xxh3_128(content))
        return {f"{component}/{name}": FileRecord(len(content), checksum)}

    def commit(self, step: int, record: CommitRecord) -> None:
        final = self._final(step)
        if final.exists() and commit.inspect_step(final).state == "committed":
            commit.set_aside(final)
        commit.commit(self._partial(step), final, record)

    def discard(self, step: int) -> None:
        if self._partial(step).exists():
            commit.remove_step(self._partial(step))

    def remove(self, step: int) -> None:
        if self._final(step).exists():
            commit.remove_step(self._final(step))

    def set_aside(self, step: int) -> str | None:
        place = commit.set_aside(self._final(step))
        return None if place is None else str(place)

    def _final(self, step: int) -> Path:
        return self._checkpoints / commit.step_name(step)

    def _partial(self, step: int) -> Path:
        return self._checkpoints / f"{commit.step_name(step)}{commit.PARTIAL_SUFFIX}"


def open_storage(checkpoints: Folder, world_size: int) -> Storage:
    """The steps in `checkpoints`, wherever that is.

    Raises:
        CheckpointError: several processes cannot share such a store, or its package is not installed.
    """
    if not isinstance(checkpoints, StoreFolder):
        return LocalStorage(checkpoints)
    if checkpoints.scheme == "memory" and world_size > 1:
        raise CheckpointError(
            f"{checkpoints} lies in the memory of one process, and this run has {world_size}; set ckpt.url "
            "to another store, or remove it to save in the run folder"
        )
    if checkpoints.scheme == "memory":
        logger.warning("checkpoints in %s are gone when this process ends", checkpoints)
    check_installed(checkpoints.scheme)
    return StoreStorage(checkpoints, component=COMPONENT)


def open_reader(step_folder: Folder) -> StorageReader:
    """A DCP reader of the tensors that `step_folder` holds.

    Raises:
        CheckpointError: the package that the store needs is not installed.
    """
    if isinstance(step_folder, StoreFolder):
        return StoreReader(step_folder / COMPONENT)
    return FileSystemReader(step_folder / COMPONENT)


def read_file(step_folder: Folder, name: str, component: str = COMPONENT) -> bytes:
    """One file that `Storage.write_file` wrote.

    Raises:
        OSError: it cannot be read.
    """
    return read_bytes(step_folder, f"{component}/{name}")
