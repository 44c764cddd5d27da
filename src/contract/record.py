"""What makes a folder a checkpoint: the commit record, the names of steps, and the rules that judge one.

The rules look at names and sizes only, so that they are the same for every kind of storage: `judge` is given
what a folder holds, and never looks itself. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import xxhash

from contract.store import Folder, StoreFolder

FORMAT_VERSION = 1
RECORD_NAME = "complete.json"
SUPERSEDED_NAME = "superseded.json"
"""In a store, the object that takes a step out of the list: it is of a history that was left."""
PARTIAL_SUFFIX = ".partial"
CHECKSUM_KIND = "xxh3_128"

_STEP_NAME = re.compile(r"step_(0|[1-9][0-9]*)(\.partial)?")
_STEP_NAME_IN_STORE = re.compile(r"step_(0|[1-9][0-9]*)(\.(?:[2-9]|[1-9][0-9]+))?")

State = Literal["committed", "uncommitted", "damaged", "unknown_format"]


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a step: size in bytes, and `xxh3_128:<hex>` of its content (None: none was computed)."""

    size: int
    checksum: str | None


class CommitRecord(msgspec.Struct, frozen=True):
    """What `complete.json` holds.

    Attributes:
        components: processes whose state is in this step; each has a folder of that name.
        files: by path relative to the step's folder, with `/`; `complete.json` itself is not listed.
        versions: of python, torch, transformers and tailrace.
        config_digest: `digest_config` of the configuration that the run had.
        created: UTC time of the commit, ISO 8601.
    """

    format_version: int
    step: int
    world_size: int
    components: list[str]
    files: dict[str, FileRecord]
    versions: dict[str, str]
    config_digest: str
    created: str

    @property
    def num_bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(file.size for file in self.files.values())


class _FormatOnly(msgspec.Struct):
    format_version: int


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One folder of a step.

    Attributes:
        state: `uncommitted` was never finished (or is half deleted), `damaged` was committed but its files
            are not what the record says, `unknown_format` was written by another version of Tailrace.
        problem: why it cannot be loaded; None if and only if it is committed.
        record: None where `complete.json` is missing or cannot be read.
    """

    step: int
    path: Folder
    state: State
    problem: str | None
    record: CommitRecord | None

    @property
    def was_committed(self) -> bool:
        """Whether this was a checkpoint once. In a store, a step that is half deleted cannot be told from one
        that was never finished.
        """
        if isinstance(self.path, StoreFolder):
            return self.state != "uncommitted"
        return not self.path.name.endswith(PARTIAL_SUFFIX)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a step's folder holds: `size(name)` in bytes, None if there is no such file; `read(name)`, which
    raises `OSError`.
    """

    size: Callable[[str], int | None]
    read: Callable[[str], bytes]


def step_name(step: int) -> str:
    """Name of the folder of a committed step."""
    return f"step_{step}"


def is_step_name(name: str, *, in_store: bool = False) -> bool:
    """Whether this is the name of a step's folder, committed or not."""
    return (_STEP_NAME_IN_STORE if in_store else _STEP_NAME).fullmatch(name) is not None


def list_order(entry: StepEntry) -> tuple[int, int, str]:
    """Sorts steps by number; of one number, the one that counts more comes last."""
    if isinstance(entry.path, StoreFolder):
        return entry.step, len(entry.path.name), entry.path.name
    return entry.step, -len(entry.path.name), entry.path.name


def judge(path: Folder, contents: Contents) -> StepEntry:
    """Judge one step. Where its name is not that of a step, the record says the number (or else -1)."""
    named = (_STEP_NAME_IN_STORE if isinstance(path, StoreFolder) else _STEP_NAME).fullmatch(path.name)
    step = int(named[1]) if named else -1
    if named and named[2] == PARTIAL_SUFFIX:
        return StepEntry(
            step, path, "uncommitted", "it was never committed: being written, or cut short", None
        )
    try:
        content = contents.read(RECORD_NAME)
    except FileNotFoundError:
        problem = f"{RECORD_NAME} is missing: it was never committed, or is being deleted"
        return StepEntry(step, path, "uncommitted", problem, None)
    except OSError as error:
        return StepEntry(step, path, "damaged", f"{RECORD_NAME} cannot be read: {error.strerror}", None)
    try:
        version = msgspec.json.decode(content, type=_FormatOnly).format_version
        if version != FORMAT_VERSION:
            problem = f"its format version is {version}, this Tailrace reads version {FORMAT_VERSION}"
            return StepEntry(step, path, "unknown_format", problem, None)
        record = msgspec.json.decode(content, type=CommitRecord)
    except msgspec.DecodeError as error:
        return StepEntry(step, path, "damaged", f"{RECORD_NAME} is not a commit record: {error}", None)
    if named is None:
        step = record.step
    problem = find_problem(contents, step, record)
    return StepEntry(step, path, "committed" if problem is None else "damaged", problem, record)


def find_problem(contents: Contents, step: int, record: CommitRecord) -> str | None:
    """Why `contents` are not the files of `record`, by names and sizes; None if they are."""
    if record.step != step:
        return f"{RECORD_NAME} is that of step {record.step}"
    for component in record.components:
        if not any(name.startswith(f"{component}/") for name in record.files):
            return f"no file of component {component!r} was recorded"
    for name, file in record.files.items():
        size = contents.size(name)
        if size is None:
            return f"{name} is missing"
        if size != file.size:
            return f"{name} has {size} bytes, {file.size} were recorded"
    return None


def encode_record(record: CommitRecord) -> bytes:
    """The content of `complete.json`."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2)


def format_checksum(digest: xxhash.xxh3_128) -> str:
    """The text that `FileRecord.checksum` holds for a finished digest."""
    return f"{CHECKSUM_KIND}:{digest.hexdigest()}"


def digest_config(config: Mapping[str, Any]) -> str:
    """Digest of a configuration (JSON values); the order of keys does not matter."""
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
