"""The commit point of checkpoints: how a step comes to exist, ceases to, and is chosen.

A step exists if and only if its `complete.json` can be read, is of a known format, and every file it lists
has the recorded size (`contract.record` holds the rules). Deletion takes `complete.json` away first. Names
that are not those of steps are neither chosen nor changed.

On a file system everything is written into `step_N.partial/` first, and one rename makes it exist. A store
has no rename: files are written into `step_N/` (or `step_N.2/`, ... where an older history's step N lies),
and `complete.json`, which appears whole or not at all, is written last.

Every process that asks "which step?" goes through `resolve_step`. What the files hold is the business of the
components (`trainer/`, `orchestrator/`) that write them. No torch.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from contract.errors import CheckpointError
from contract.record import (
    CHECKSUM_KIND,
    PARTIAL_SUFFIX,
    RECORD_NAME,
    SUPERSEDED_NAME,
    CommitRecord,
    Contents,
    FileRecord,
    StepEntry,
    encode_record,
    find_problem,
    format_checksum,
    is_step_name,
    judge,
    list_order,
    step_name,
)
from contract.store import Folder, StoreFolder, open_binary, store_errors

_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ResolvedStep:
    """The chosen step, and a sentence for each newer one that could not be chosen."""

    entry: StepEntry
    record: CommitRecord
    warnings: tuple[str, ...]


def inspect_step(path: Folder) -> StepEntry:
    """Look at one step folder. Where its name is not that of a step, the record says the number (or else -1).

    Raises:
        CheckpointError: a store does not answer.
    """
    return judge(path, _local_contents(path) if isinstance(path, Path) else _stored(path, _list_store(path)))


def scan(checkpoints: Folder) -> list[StepEntry]:
    """Every step folder, ascending by number; none if `checkpoints` is missing. Steps of histories that were
    left are not listed.

    Raises:
        CheckpointError: the folder exists and cannot be listed, or a store does not answer.
    """
    if isinstance(checkpoints, StoreFolder):
        return [entry for entry, is_superseded in _scan_store(checkpoints) if not is_superseded]
    try:
        paths = [path for path in checkpoints.iterdir() if is_step_name(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints folder {checkpoints} cannot be listed: {error.strerror}"
        ) from error
    return sorted(map(inspect_step, paths), key=list_order)


def scan_superseded(checkpoints: Folder) -> list[StepEntry]:
    """The steps that `scan` leaves out, because a run went on from an earlier one.

    Raises:
        CheckpointError: as `scan`.
    """
    if isinstance(checkpoints, StoreFolder):
        return [entry for entry, is_superseded in _scan_store(checkpoints) if is_superseded]
    folders = sorted(path for path in checkpoints.glob("superseded*") if path.is_dir())
    return [entry for folder in folders for entry in scan(folder)]


def resolve_step(
    checkpoints: Folder, step: int | None = None, *, components: Collection[str] = ()
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
    if not any(entry.was_committed for entry in entries):
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
    _check_written(partial, _local_contents(partial), [name for name, _ in _walk(partial)], record)
    for _, path in _walk(partial):
        fsync(path)
    (partial / RECORD_NAME).write_bytes(encode_record(record))
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


def commit_in_store(folder: StoreFolder, record: CommitRecord) -> None:
    """Make the step whose files lie in `folder` exist. Other committed steps of its number are superseded.

    Raises:
        CheckpointError: the files are not those of `record`; or a step of this number is of an unknown
            format.
        OSError: the store does not answer, or refuses; `folder` is to be removed then.
    """
    sizes = folder.sizes()
    _check_written(folder, _stored(folder, sizes), sizes, record)
    for entry in scan(folder.parent):
        if entry.step != record.step or str(entry.path) == folder.url:
            continue
        assert isinstance(entry.path, StoreFolder)
        if entry.state == "unknown_format":
            raise CheckpointError(f"{entry.path} exists already and is not replaced ({entry.problem})")
        if entry.state == "committed":
            supersede(entry.path)
        else:
            remove_step(entry.path)
    folder.write_bytes(RECORD_NAME, encode_record(record))


def folder_to_write(checkpoints: StoreFolder, step: int) -> StoreFolder:
    """Where a new attempt at `step` goes: the first of `step_N`, `step_N.2`, ... that was not committed.

    Raises:
        OSError: the store does not answer, or refuses.
    """
    number = 1
    while True:
        folder = checkpoints / (step_name(step) if number == 1 else f"{step_name(step)}.{number}")
        if not folder.holds(RECORD_NAME):
            return folder
        number += 1


def supersede(folder: StoreFolder) -> None:
    """Take a step of a store out of the list; its files stay where they are, and it can be loaded by name.

    Raises:
        OSError: the store does not answer, or refuses.
    """
    folder.write_bytes(SUPERSEDED_NAME, b"{}\n")


def remove_step(path: Folder) -> None:
    """Delete one step folder; after a crash at any instant it is whole, or does not count as committed.

    Raises:
        OSError: something cannot be deleted.
    """
    if isinstance(path, StoreFolder):
        names = list(path.sizes())
        path.delete([name for name in names if name == RECORD_NAME])
        path.delete([name for name in names if name != RECORD_NAME])
        return
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


def set_aside(path: Path) -> Path | None:
    """Move a step, whole, out of the way: to `superseded/step_N` beside it (or `superseded_2/`, ...).

    Returns:
        Where it lies now; None if there is no such step: an attempt before this one may have moved it.
    """
    if not path.exists():
        # That attempt may have failed before its rename was durable.
        fsync(path.parent)
        return None
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


def verify(path: Folder) -> list[str]:
    """Read every file of a step again; returns what differs from its record (size only, without checksum).

    Raises:
        CheckpointError: a store does not answer.
    """
    entry = inspect_step(path)
    if entry.problem is not None or entry.record is None:
        return [entry.problem or f"{RECORD_NAME} is missing"]
    return verify_files(path, entry.record.files)


def verify_files(path: Folder, files: Mapping[str, FileRecord]) -> list[str]:
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
            found = hash_file(path, name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if found != file.checksum:
            problems.append(f"{name} is damaged: its content is {found}, {file.checksum} was recorded")
    return problems


def hash_file(folder: Folder, name: str) -> str:
    """Checksum of a file's content, as `FileRecord` holds it.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    with store_errors(f"{folder}/{name}"), open_binary(folder, name) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return format_checksum(digest)


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _local_contents(folder: Path) -> Contents:
    def size(name: str) -> int | None:
        try:
            return (folder / name).stat().st_size
        except OSError:
            return None

    return Contents(size, lambda name: (folder / name).read_bytes())


def _stored(folder: StoreFolder, sizes: Mapping[str, int]) -> Contents:
    def read(name: str) -> bytes:
        if name not in sizes:
            raise FileNotFoundError(name)
        try:
            return folder.read_bytes(name)
        except FileNotFoundError:
            raise  # deleted since it was listed
        except OSError as error:
            # A store that does not answer now may answer later. That makes no step a damaged one.
            raise CheckpointError(f"{folder}/{name} cannot be read: {error.strerror}") from error

    return Contents(sizes.get, read)


def _list_store(folder: StoreFolder) -> dict[str, int]:
    try:
        return folder.sizes()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}") from error


def _scan_store(checkpoints: StoreFolder) -> list[tuple[StepEntry, bool]]:
    """All steps in the order of the list, and whether each is of a history that was left."""
    folders: defaultdict[StoreFolder, dict[str, int]] = defaultdict(dict)
    for name, size in _list_store(checkpoints).items():
        first, separator, rest = name.partition("/")
        if separator and is_step_name(first, in_store=True):
            folders[checkpoints / first][rest] = size
    entries = [
        (judge(folder, _stored(folder, sizes)), SUPERSEDED_NAME in sizes) for folder, sizes in folders.items()
    ]
    return sorted(entries, key=lambda pair: list_order(pair[0]))


def _check_written(folder: Folder, contents: Contents, names: Collection[str], record: CommitRecord) -> None:
    problem = find_problem(contents, record.step, record)
    unknown = sorted(set(names) - record.files.keys() - {RECORD_NAME})
    if problem is not None or unknown:
        problem = problem or f"{unknown[0]} is not of this attempt"
        raise CheckpointError(f"{folder} does not hold what was written: {problem}")


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
