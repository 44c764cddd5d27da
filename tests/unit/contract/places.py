"""Checkpoints made by hand, in a local folder or in a store in this process's memory."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from pathlib import Path

import xxhash

from contract.commit import commit, commit_in_store, folder_to_write
from contract.record import FORMAT_VERSION, CommitRecord, FileRecord
from contract.store import Folder, StoreFolder

FILES = {
    "trainer/.metadata": b"meta",
    "trainer/__0_0.distcp": b"tensors of rank 0",
    "trainer/state.json": b"{}",
}


def record_of(step: int, files: dict[str, bytes], *, checksums: bool = True) -> CommitRecord:
    records = {
        name: FileRecord(
            len(content), f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}" if checksums else None
        )
        for name, content in files.items()
    }
    return CommitRecord(
        FORMAT_VERSION, step, 2, ["trainer"], records, {"torch": "2"}, "abc", "2026-01-01T00:00:00+00:00"
    )


class Place(ABC):
    """A checkpoints folder; names of files are relative to it."""

    checkpoints: Folder

    @abstractmethod
    def put(self, name: str, content: bytes) -> None: ...

    @abstractmethod
    def drop(self, name: str) -> None: ...

    @abstractmethod
    def get(self, name: str) -> bytes: ...

    @abstractmethod
    def begin(self, step: int, files: dict[str, bytes] = FILES) -> Folder:
        """Write the files of a step, as far as before its commit; returns their folder."""

    @abstractmethod
    def commit(self, written: Folder, record: CommitRecord) -> Folder:
        """Make `written` exist; returns the folder of the step."""

    def write_step(self, step: int, *, checksums: bool = True) -> Folder:
        return self.commit(self.begin(step), record_of(step, FILES, checksums=checksums))


class LocalPlace(Place):
    def __init__(self, folder: Path) -> None:
        self.folder = self.checkpoints = folder

    def put(self, name: str, content: bytes) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(content)

    def drop(self, name: str) -> None:
        (self.folder / name).unlink()

    def get(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def begin(self, step: int, files: dict[str, bytes] = FILES) -> Path:
        for name, content in files.items():
            self.put(f"step_{step}.partial/{name}", content)
        return self.folder / f"step_{step}.partial"

    def commit(self, written: Folder, record: CommitRecord) -> Path:
        assert isinstance(written, Path)
        commit(written, self.folder / f"step_{record.step}", record)
        return self.folder / f"step_{record.step}"


class MemoryPlace(Place):
    def __init__(self) -> None:
        self.store = self.checkpoints = StoreFolder(f"memory://{uuid.uuid4().hex}/run/checkpoints")

    def put(self, name: str, content: bytes) -> None:
        self.store.write_bytes(name, content)

    def drop(self, name: str) -> None:
        assert name in self.store.sizes()
        self.store.delete([name])

    def get(self, name: str) -> bytes:
        return self.store.read_bytes(name)

    def begin(self, step: int, files: dict[str, bytes] = FILES) -> StoreFolder:
        folder = folder_to_write(self.store, step)
        for name, content in files.items():
            folder.write_bytes(name, content)
        return folder

    def write_step(self, step: int, *, checksums: bool = True) -> StoreFolder:
        return self.commit(self.begin(step), record_of(step, FILES, checksums=checksums))

    def commit(self, written: Folder, record: CommitRecord) -> StoreFolder:
        assert isinstance(written, StoreFolder)
        commit_in_store(written, record)
        return written
