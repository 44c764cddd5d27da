"""Writes this rank's tensors of one step: several threads, large sequential writes, one file per thread.

The threads take blocks off one queue in the order of the plan, so that what comes first in a snapshot is
written first whatever the sizes are. Checksums are computed while writing, a file is durable when its thread
ends, and an error of any thread fails the write on this rank (in DCP's own writer it is printed and lost).
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Protocol, cast

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemBase, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from contract.errors import CheckpointError
from contract.record import FileRecord, format_checksum
from trainer.checkpoint.direct import open_direct
from trainer.checkpoint.tensors import EntrySavePlanner

_BUFFER_BYTES = 1 << 20


class WritableFile(Protocol):
    """What a tensor file needs of a file."""

    def write(self, data: memoryview, /) -> int:
        """Take all of `data`; it may change as soon as this returns."""
        ...


class Files(Protocol):
    """Where files are written: the few things in which file systems differ."""

    names: FileSystemBase
    """DCP's own view of the place: paths, existence, renaming."""

    def create(self, path: str | os.PathLike[str]) -> AbstractContextManager[WritableFile]:
        """Open a new file for writing; it is durable when the context has been left without an error."""
        ...


class LocalFiles:
    """Files of a local (or mounted) file system."""

    def __init__(self) -> None:
        self.names: FileSystemBase = FileSystem()

    @contextmanager
    def create(self, path: str | os.PathLike[str]) -> Iterator[WritableFile]:
        """See `Files`."""
        direct = open_direct(path)
        if direct is not None:
            with direct:
                yield direct
            return
        with Path(path).open("wb", buffering=_BUFFER_BYTES) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


class TensorWriter(FileSystemWriter):
    """A DCP writer that knows what it wrote.

    Args:
        folder: of the tensors of this step.
        files: how to write there.
        folder_name: name of `folder` inside the step, for the records.
        threads: that write at the same time, each its own file.
        checksums: whether to compute them.
    """

    def __init__(
        self, folder: str | os.PathLike[str], files: Files, *, folder_name: str, threads: int, checksums: bool
    ) -> None:
        super().__init__(folder, thread_count=threads, sync_files=False)
        recording = _RecordingFileSystem(files, folder_name, checksums)
        self.fs = recording
        self.path = recording.init_path(folder)
        self.files: dict[str, FileRecord] = recording.records
        """By name inside the step; complete once `dcp.save` has returned."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the blocks of `plan` in its order.

        Raises:
            OSError: the first error of any thread.
        """
        assert isinstance(planner, EntrySavePlanner)
        items = deque(plan.items)
        results: list[WriteResult] = []
        errors: list[BaseException] = []

        def run(index: int) -> None:
            name = f"{plan.storage_data.prefix}{index}{DEFAULT_SUFFIX}"
            try:
                # torch would compute a CRC-32 per tensor, of which nobody makes use: the checksum of the
                # file replaces it. The setting is one of this thread.
                torch.serialization.set_crc32_options(False)
                results.extend(self._write_file(name, items, planner))
            except BaseException as error:  # raised below, on the thread that waits
                errors.append(error)
                items.clear()

        # Daemons: a process that gives a hanging storage up must be able to end.
        threads = [
            threading.Thread(target=run, args=(index,), name=f"checkpoint-{index}", daemon=True)
            for index in range(min(self.thread_count, max(1, len(items))))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if len(results) != len(plan.items):
            raise CheckpointError(f"{len(results)} of {len(plan.items)} tensors were written to {self.path}")
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: deque[WriteItem], planner: EntrySavePlanner) -> list[WriteResult]:
        results: list[WriteResult] = []
        put_off: set[MetadataIndex] = set()
        if not items:
            return results
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            while True:
                try:
                    item = items.popleft()
                except IndexError:
                    break
                if item.index not in put_off and planner.can_wait(item.index):
                    put_off.add(item.index)
                    items.append(item)
                    continue
                offset = stream.tell()
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor)
                torch.save(data, cast("IO[bytes]", stream))
                length = stream.tell() - offset
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
            # The bytes are the file system's now. Making them durable takes long, and nobody need wait for
            # it.
            planner.end_of_file()
        return results


class _RecordingFileSystem(FileSystem):
    """Files that are hashed while they are written."""

    def __init__(self, files: Files, folder_name: str, checksums: bool) -> None:
        self._files = files
        self._folder_name = folder_name
        self._checksums = checksums
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with self._files.create(path) as file:
            stream = _RecordingStream(file, self._checksums)
            yield stream
        self.records[self._record_name(path)] = stream.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._files.names.rename(path, new_path)
        self.records[self._record_name(new_path)] = self.records.pop(self._record_name(path))

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        return self._files.names.concat_path(path, suffix)

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return self._files.names.init_path(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._files.names.mkdir(path)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._files.names.exists(path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._files.names.rm_file(path)

    def _record_name(self, path: str | os.PathLike[str]) -> str:
        return f"{self._folder_name}/{str(path).rpartition('/')[2]}"


class _RecordingStream(io.IOBase):
    """A forward-only binary stream over `file`, which its owner closes."""

    def __init__(self, file: WritableFile, checksums: bool) -> None:
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
        return FileRecord(self._size, None if self._digest is None else format_checksum(self._digest))
