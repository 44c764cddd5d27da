"""The commit point of checkpoints: what makes a folder a checkpoint, and how a step is chosen.

A step exists if and only if `step_N/complete.json` can be read, is of a known format, and every file it lists
has the recorded size. Everything is written into `step_N.partial/` first; one rename makes it exist. Deletion
takes `complete.json` away first. Names that are not `step_N` or `step_N.partial` are neither chosen nor
changed.

Every process that asks "which step?" goes through `resolve_step`. What the files hold is the business of the
components (`trainer/`, `orchestrator/`) that write them. Local file systems only; no torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from contract.errors import CheckpointError

FORMAT_VERSION = 1
RECORD_NAME = "complete.json"
PARTIAL_SUFFIX = ".partial"
CHECKSUM_KIND = "xxh3_128"

_STEP_NAME = re.compile(r"step_(0|[1-9][0-9]*)(\.partial)?")
_BLOCK_BYTES = 1 << 22

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
    """One `step_N` or `step_N.partial` folder.

    Attributes:
        state: `uncommitted` was never finished (or is half deleted), `damaged` was committed but its files
            are not what the record says, `unknown_format` was written by another version of Tailrace.
        problem: why it cannot be loaded; None if and only if it is committed.
        record: None where `complete.json` is missing or cannot be read.
    """

    step: int
    path: Path
    state: State
    problem: str | None
    record: CommitRecord | None


@dataclass(frozen=True, slots=True)
class ResolvedStep:
    """The chosen step, and a sentence for each newer one that could not be chosen."""

    entry: StepEntry
    record: CommitRecord
    warnings: tuple[str, ...]


def step_name(step: int) -> str:
    """Name of the folder of a committed step."""
    return f"step_{step}"


def inspect_step(path: Path) -> StepEntry:
    """Look at one step folder. Where its name is not `step_N`, the record says the number (or else -1)."""
    named = _STEP_NAME.fullmatch(path.name)
    step = int(named[1]) if named else -1
    if named and named[2]:
        return StepEntry(
            step, path, "uncommitted", "it was never committed: being written, or cut short", None
        )
    try:
        content = (path / RECORD_NAME).read_bytes()
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
    problem = _find_problem(path, step, record)
    return StepEntry(step, path, "committed" if problem is None else "damaged", problem, record)


def scan(checkpoints: Path) -> list[StepEntry]:
    """Every step folder, ascending by number (`.partial` before committed); none if `checkpoints` is missing.

    Raises:
        CheckpointError: the folder exists and cannot be listed.
    """
    try:
        paths = [path for path in checkpoints.iterdir() if _STEP_NAME.fullmatch(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints folder {checkpoints} cannot be listed: {error.strerror}"
        ) from error
    return sorted(
        (inspect_step(path) for path in paths), key=lambda entry: (entry.step, -len(entry.path.name))
    )


def resolve_step(
    checkpoints: Path, step: int | None = None, *, components: Collection[str] = ()
) -> ResolvedStep | None:
    """Choose the step to load: `step`, or else the greatest committed one, compared as a number.

    Args:
        components: what the run needs; a step that does not hold all of them cannot be chosen.

    Returns:
        None if `step` is None and nothing was ever committed: there is no step folder, or only such as a
        process died over while it wrote them.

    Raises:
        CheckpointError: `step` is missing or cannot be loaded; or there are steps and none can be loaded.
    """
    entries = scan(checkpoints)
    reasons = {entry.path: _why_not(entry, components) for entry in entries}
    usable = {entry.step: entry for entry in entries if reasons[entry.path] is None}
    available = (
        f"available: {', '.join(map(str, sorted(usable)))}" if usable else "no step here can be loaded"
    )
    if step is not None:
        if step in usable:
            return _resolved(usable[step], ())
        for entry in reversed(entries):
            if entry.step == step:
                raise CheckpointError(
                    f"step {step} cannot be loaded from {entry.path}: {reasons[entry.path]}; {available}"
                )
        raise CheckpointError(f"there is no step {step} in {checkpoints}; {available}")
    if all(entry.path.name.endswith(PARTIAL_SUFFIX) for entry in entries):
        return None
    if not usable:
        found = "; ".join(f"{entry.path.name}: {reasons[entry.path]}" for entry in entries)
        raise CheckpointError(
            f"{checkpoints} holds checkpoints, but none that can be loaded ({found}); name another one with "
            "resume.dir, or start the run anew in an empty folder (or with `--clean`)"
        )
    latest = usable[max(usable)]
    newer = [entry for entry in entries if entry.step > latest.step]
    return _resolved(
        latest, tuple(f"{entry.path.name} is not used: {reasons[entry.path]}" for entry in newer)
    )


def commit(partial: Path, final: Path, record: CommitRecord) -> None:
    """Make `partial` exist as `final`, durably: after a crash at any instant `final` is whole or not there.

    An uncommitted or damaged folder that has the name of `final` is removed.

    Raises:
        CheckpointError: the files are not those of `record`; or `final` is committed, or of an unknown
            format.
        OSError: the disk refuses; `final` does not exist then.
    """
    problem = _find_problem(partial, record.step, record)
    unknown = sorted({name for name, _ in _walk(partial)} - record.files.keys() - {RECORD_NAME})
    if problem is not None or unknown:
        problem = problem or f"{unknown[0]} is not of this attempt"
        raise CheckpointError(f"{partial} does not hold what was written: {problem}")
    for _, path in _walk(partial):
        fsync(path)
    (partial / RECORD_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
    fsync(partial / RECORD_NAME)
    # The names inside must be durable before the rename that makes them count.
    for folder in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
        fsync(folder)
    if final.exists():
        entry = inspect_step(final)
        if entry.state in ("committed", "unknown_format"):
            raise CheckpointError(
                f"{final} exists already and is not replaced ({entry.problem or 'it is committed'})"
            )
        remove_step(final)
    partial.rename(final)
    fsync(final.parent)


def remove_step(path: Path) -> None:
    """Delete one step folder; after a crash at any instant it is whole, or does not count as committed."""
    try:
        (path / RECORD_NAME).unlink()
        fsync(path)
    except FileNotFoundError:
        pass
    tomb = path.with_name(path.name.removesuffix(PARTIAL_SUFFIX) + PARTIAL_SUFFIX)
    if not tomb.exists():
        # A deletion that is cut short leaves a name that the next start of the run cleans up.
        path.rename(tomb)
        path = tomb
    shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Move a step, whole, out of the way: to `superseded/step_N` beside it (or `superseded_2/`, ...)."""
    number = 1
    while True:
        target = path.parent / ("superseded" if number == 1 else f"superseded_{number}") / path.name
        if not target.exists():
            break
        number += 1
    target.parent.mkdir(exist_ok=True)
    path.rename(target)
    fsync(target.parent)
    fsync(path.parent)
    return target


def verify(path: Path) -> list[str]:
    """Read every file of a step again; returns what differs from its record (size only, without checksum)."""
    entry = inspect_step(path)
    if entry.problem is not None or entry.record is None:
        return [entry.problem or f"{RECORD_NAME} is missing"]
    return verify_files(path, entry.record.files)


def verify_files(path: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """`verify` for some of the files of the step folder `path`."""
    problems = []
    for name, file in files.items():
        if file.checksum is None:
            continue
        if not file.checksum.startswith(f"{CHECKSUM_KIND}:"):
            problems.append(
                f"{name}: its checksum {file.checksum!r} is of a kind that this Tailrace does not know"
            )
            continue
        try:
            found = hash_file(path / name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found != file.checksum:
            problems.append(f"{name} is damaged: its content is {found}, {file.checksum} was recorded")
    return problems


def hash_file(path: Path) -> str:
    """Checksum of a file's content, as `FileRecord` holds it."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return format_checksum(digest)


def format_checksum(digest: xxhash.xxh3_128) -> str:
    """The text that `FileRecord.checksum` holds for a finished digest."""
    return f"{CHECKSUM_KIND}:{digest.hexdigest()}"


def digest_config(config: Mapping[str, Any]) -> str:
    """Digest of a configuration (JSON values); the order of keys does not matter."""
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _find_problem(path: Path, step: int, record: CommitRecord) -> str | None:
    if record.step != step:
        return f"{RECORD_NAME} is that of step {record.step}"
    for component in record.components:
        if not any(name.startswith(f"{component}/") for name in record.files):
            return f"no file of component {component!r} was recorded"
    for name, file in record.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != file.size:
            return f"{name} has {size} bytes, {file.size} were recorded"
    return None


def _why_not(entry: StepEntry, components: Collection[str]) -> str | None:
    if entry.problem is not None or entry.record is None:
        return entry.problem
    missing = sorted(set(components) - set(entry.record.components))
    return f"it holds no state of {', '.join(missing)}" if missing else None


def _resolved(entry: StepEntry, warnings: tuple[str, ...]) -> ResolvedStep:
    assert entry.record is not None
    return ResolvedStep(entry, entry.record, warnings)


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path
