"""Steps in an object store: written in place, and committed by a marker that comes last.

A file that is not written to its end must not appear at all, nor leave parts behind: what fails is abandoned,
never closed. All names and the rules are those of `contract.commit`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO, cast

import xxhash
from fsspec.spec import AbstractBufferedFile
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemBase, _StorageInfo

from contract import commit
from contract.errors import CheckpointError
from contract.record import CommitRecord, FileRecord, StepEntry, format_checksum
from contract.store import PART_BYTES, StoreFolder, store_errors
from trainer.checkpoint.tensor_writer import TensorWriter, WritableFile

_SLICE_BYTES = 4 << 20
_PROBE = "write_test"


class StoreStorage:
    """Steps as folders `step_N` of `checkpoints`, see `Storage`.

    Args:
        component: the folder inside a step that tensors are written into, and files without another one.
        part_bytes: size of the parts in which tensors travel; each writer thread holds up to three of them.
    """

    def __init__(
        self, checkpoints: StoreFolder, *, component: str = "trainer", part_bytes: int = PART_BYTES
    ) -> None:
        self._checkpoints = checkpoints
        self._component = component
        self._files = StoreFiles(checkpoints, part_bytes)
        # On the coordinator: where the present attempt at a step is written. After a commit whose answer was
        # lost, the store itself could no longer tell.
        self._open: dict[int, StoreFolder] = {}

    def describe(self) -> str:
        return str(self._checkpoints)

    def prepare(self) -> None:
        self._checkpoints.write_bytes(_PROBE, b"")
        self._checkpoints.delete([_PROBE])
        # The run that owns the folder is starting, so nothing in it can be in the middle of being written.
        for entry in [*self.scan(), *commit.scan_superseded(self._checkpoints)]:
            if entry.state == "uncommitted":
                commit.remove_step(entry.path)

    def scan(self) -> list[StepEntry]:
        return commit.scan(self._checkpoints)

    def free_bytes(self) -> int | None:
        return None

    def begin(self, step: int) -> None:
        folder = commit.folder_to_write(self._checkpoints, step)
        commit.remove_step(folder)
        self._open[step] = folder

    def tensor_writer(self, step: int, *, threads: int, checksums: bool) -> TensorWriter:
        return TensorWriter(
            str(self._written(step) / self._component),
            self._files,
            folder_name=self._component,
            threads=threads,
            checksums=checksums,
        )

    def write_file(
        self, step: int, name: str, content: bytes, component: str | None = None
    ) -> dict[str, FileRecord]:
        path = f"{component or self._component}/{name}"
        self._written(step).write_bytes(path, content)
        return {path: FileRecord(len(content), format_checksum(xxhash.xxh3_128(content)))}

    def commit(self, step: int, record: CommitRecord) -> None:
        commit.commit_in_store(self._written(step), record)
        del self._open[step]

    def discard(self, step: int) -> None:
        commit.remove_step(self._written(step))
        self._open.pop(step, None)

    def remove(self, step: int) -> None:
        for folder in self._find(step):
            commit.remove_step(folder)

    def set_aside(self, step: int) -> str | None:
        """A small object beside its files does it: a store has no renaming, and a copy would take long."""
        folders = self._find(step)
        for folder in folders:
            commit.supersede(folder)
        return ", ".join(f"{folder} with {commit.SUPERSEDED_NAME}" for folder in folders) or None

    def _find(self, step: int) -> list[StoreFolder]:
        return [
            entry.path for entry in self.scan() if entry.step == step and isinstance(entry.path, StoreFolder)
        ]

    def _written(self, step: int) -> StoreFolder:
        # The other ranks ask between the coordinator's `begin` and its `commit`, and get the same answer.
        return self._open.get(step) or commit.folder_to_write(self._checkpoints, step)


class StoreFiles(FileSystemBase):
    """Files of a store for DCP: reading, and (as `tensor_writer.Files`) writing."""

    def __init__(self, folder: StoreFolder, part_bytes: int = PART_BYTES) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self.names: FileSystemBase = self

    @contextmanager
    def create(self, path: str | os.PathLike[str]) -> Iterator[WritableFile]:
        """See `Files`."""
        url, filesystem = os.fspath(path), self._folder.filesystem
        with store_errors(url):
            file: Any = filesystem.open(url, "wb", block_size=self._part_bytes)
            try:
                yield _Slices(file)
                file.close()
            except BaseException:
                _abandon(file)
                with suppress(Exception):
                    filesystem.rm_file(url)
                raise

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "rb", mode
        url = os.fspath(path)
        with (
            store_errors(url),
            # Every read asks for exactly its bytes: tensors are read whole, and in any order.
            self._folder.filesystem.open(url, "rb", cache_type="none") as file,
        ):
            yield cast("io.IOBase", file)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        # DCP does this to its list of tensors only, which is small.
        with store_errors(os.fspath(path)):
            self._folder.filesystem.mv(os.fspath(path), os.fspath(new_path))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Folders need not be made."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" in os.fspath(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        folder, _, name = os.fspath(path).rpartition("/")
        return StoreFolder(folder).holds(name)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        folder, _, name = os.fspath(path).rpartition("/")
        StoreFolder(folder).delete([name])


class StoreReader(FileSystemReader):
    """A DCP reader of the tensors in `folder`: one request per tensor, for exactly its bytes."""

    def __init__(self, folder: StoreFolder) -> None:
        super().__init__(str(folder))
        files = StoreFiles(folder)
        self.fs = files
        self.path = files.init_path(str(folder))

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        file.seek(sinfo.offset)
        content = file.read(sinfo.length)
        if len(content) != sinfo.length:
            raise CheckpointError(
                f"{self.path}/{sinfo.relative_path} ends at byte {sinfo.offset + len(content)}, "
                f"{sinfo.offset + sinfo.length} are needed"
            )
        return io.BytesIO(content)


class _Slices:
    """Hands large writes on in slices: a file of a store copies whatever it is given at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        for start in range(0, len(data), _SLICE_BYTES):
            self._file.write(data[start : start + _SLICE_BYTES])
        return len(data)


def _abandon(file: Any) -> None:
    """Give a file up. Closing it, as its destructor also does, would make what is there count as whole."""
    if isinstance(file, AbstractBufferedFile):
        with suppress(Exception):
            file.discard()
        file.closed = True
