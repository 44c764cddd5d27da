"""Where the steps of a run lie: one interface, and its implementation on a local (or mounted) file system.

The writer of tensors computes checksums while it writes, makes each file durable when it is full, and reports
what it wrote. A failure in any of its threads fails the write (DCP's own writer loses it and reports
success).
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from contract import commit
from contract.commit import CommitRecord, FileRecord, StepEntry
from contract.errors import CheckpointError

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

    def write_file(self, step: int, name: str, content: bytes) -> dict[str, FileRecord]:
        """Write one durable file; returns its record by its name inside the step."""
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

    def set_aside(self, step: int) -> str:
        """Take a committed step out of the list without deleting it; returns where it is now."""
        ...


class TensorWriter(StorageWriter):
    """A DCP writer that knows what it wrote."""

    files: dict[str, FileRecord]
    """By name inside the step; complete once `dcp.save` has returned."""


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
        return LocalTensorWriter(self._partial(step) / COMPONENT, threads=threads, checksums=checksums)

    def write_file(self, step: int, name: str, content: bytes) -> dict[str, FileRecord]:
        path = self._partial(step) / COMPONENT / name
        path.write_bytes(content)
        commit.fsync(path)
        checksum = commit.format_checksum(xxhash.xxh3_128(content))
        return {f"{COMPONENT}/{name}": FileRecord(len(content), checksum)}

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

    def set_aside(self, step: int) -> str:
        return str(commit.set_aside(self._final(step)))

    def _final(self, step: int) -> Path:
        return self._checkpoints / commit.step_name(step)

    def _partial(self, step: int) -> Path:
        return self._checkpoints / f"{commit.step_name(step)}{commit.PARTIAL_SUFFIX}"


class LocalTensorWriter(FileSystemWriter, TensorWriter):
    """DCP's own file format, `threads` files per rank."""

    def __init__(self, folder: Path, *, threads: int, checksums: bool) -> None:
        super().__init__(folder, thread_count=threads, sync_files=False)
        self.fs = _RecordingFileSystem(checksums)
        self.files = self.fs.files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future = super().write_data(plan, planner)
        self._raise_first_error()
        written = len(future.value())
        if written != len(plan.items):
            raise CheckpointError(f"{written} of {len(plan.items)} tensors were written to {self.path}")
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self._raise_first_error()

    def _raise_first_error(self) -> None:
        if self.fs.errors:
            raise self.fs.errors[0]


class _RecordingFileSystem(FileSystem):
    """Files that are hashed while they are written, and durable when they are closed.

    Errors are collected, not raised out of the stream: raised in a writer thread they would only be printed.
    """

    def __init__(self, checksums: bool) -> None:
        self._checksums = checksums
        self.files: dict[str, FileRecord] = {}
        self.errors: list[Exception] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        opened = False
        try:
            with Path(path).open("wb", buffering=1 << 20) as file:
                stream = _RecordingStream(file, self._checksums)
                opened = True
                yield stream
                file.flush()
                os.fsync(file.fileno())
            self.files[f"{COMPONENT}/{Path(path).name}"] = stream.record()
        except Exception as error:
            self.errors.append(error)
            if not opened:
                raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        record = self.files.pop(f"{COMPONENT}/{Path(path).name}", None)
        if record is not None:
            self.files[f"{COMPONENT}/{Path(new_path).name}"] = record


class _RecordingStream(io.IOBase):
    """A forward-only binary stream over `file`, which its owner closes."""

    def __init__(self, file: BinaryIO, checksums: bool) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128() if checksums else None
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        if self._digest is not None:
            self._digest.update(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def record(self) -> FileRecord:
        """Size and checksum of what was written so far."""
        return FileRecord(self._size, None if self._digest is None else commit.format_checksum(self._digest))


def open_reader(step_folder: Path) -> StorageReader:
    """A DCP reader of the tensors that `step_folder` holds."""
    return FileSystemReader(step_folder / COMPONENT)


def read_file(step_folder: Path, name: str) -> bytes:
    """One file that `Storage.write_file` wrote.

    Raises:
        OSError: it cannot be read.
    """
    return (step_folder / COMPONENT / name).read_bytes()
