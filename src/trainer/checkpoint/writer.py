"""One write of one snapshot: files of all ranks, then the commit. Runs on whichever thread it is called from.

All its collectives are on the group it is given, so that a write in the background never meets the training
step. A rank that fails is learnt by all: the write then commits nothing, removes what it wrote, and raises
everywhere.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from contract.commit import FORMAT_VERSION, CommitRecord, FileRecord, digest_config
from contract.errors import CheckpointError
from trainer.checkpoint.agreement import on_all_ranks
from trainer.checkpoint.base import Snapshot, count_bytes
from trainer.checkpoint.storage import Storage
from trainer.checkpoint.tensors import EntrySavePlanner, as_entries
from trainer.parallel.layout import LogicalTensor

STATE_FILE = "state.json"
CONFIG_FILE = "config.json"
WEIGHTS_PREFIX = "model."
"""Names of the tensors of part `model`, which must be finite in every save."""

_OVERHEAD = 1.02
_OVERHEAD_BYTES = 1 << 20
"""Room for metadata, names and padding beside the tensors: a share, and a constant."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed step: its bytes over all ranks, and the seconds from the first file to the commit."""

    step: int
    num_bytes: int
    write_seconds: float


def write_snapshot(
    storage: Storage,
    snapshot: Snapshot,
    group: dist.ProcessGroup,
    *,
    threads: int,
    checksums: bool,
    components: tuple[str, ...],
) -> SaveReport:
    """Write and commit; collective over `group`.

    Raises:
        CheckpointError: it failed on some rank; nothing is committed, and every rank raises.
    """
    start = time.perf_counter()
    is_coordinator = dist.get_rank(group) == 0
    needed = bytes_needed(snapshot.tensors)
    what = f"checkpoint of step {snapshot.step} was not saved, earlier ones are unchanged"
    small_files = on_all_ranks(
        group, what, lambda: _begin(storage, snapshot, needed) if is_coordinator else {}
    )
    try:
        # DCP's list of tensors is the last of the trainer's files.
        tensor_files = on_all_ranks(
            group, what, lambda: _write_tensors(storage, snapshot, group, threads, checksums)
        )
        files = {name: file for of_rank in small_files + tensor_files for name, file in of_rank.items()}
        record = _record(snapshot, dist.get_world_size(group), components, files)
        on_all_ranks(group, what, lambda: storage.commit(snapshot.step, record) if is_coordinator else None)
    except CheckpointError as error:
        # Every rank has left the write by now, or `on_all_ranks` would still wait.
        room = _discard(storage, snapshot.step) if is_coordinator else ""
        raise CheckpointError(
            f"{error} (it needs {format_bytes(needed)} in {storage.describe()}{room})"
        ) from error
    return SaveReport(snapshot.step, record.num_bytes, time.perf_counter() - start)


def bytes_needed(tensors: Mapping[str, LogicalTensor]) -> int:
    """Room on disk for one checkpoint of `tensors`."""
    return int(count_bytes(tensors) * _OVERHEAD) + _OVERHEAD_BYTES


def check_room(storage: Storage, needed: int) -> None:
    """Refuse to begin what cannot end.

    Raises:
        CheckpointError: fewer than `needed` bytes are free.
    """
    free = storage.free_bytes()
    if free is not None and free < needed:
        raise CheckpointError(
            f"{storage.describe()} has {format_bytes(free)} free and one checkpoint needs "
            f"{format_bytes(needed)}; free some space, lower ckpt.keep_last, or set another output_dir"
        )


def format_bytes(num_bytes: float) -> str:
    """`1.6 GB`; decimal units."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"


def _begin(storage: Storage, snapshot: Snapshot, needed: int) -> dict[str, FileRecord]:
    storage.discard(snapshot.step)
    check_room(storage, needed)
    try:
        storage.begin(snapshot.step)
        state = {"step": snapshot.step, "parts": snapshot.values}
        return storage.write_file(snapshot.step, STATE_FILE, _encode(state)) | storage.write_file(
            snapshot.step, CONFIG_FILE, _encode(snapshot.config)
        )
    except Exception:
        _discard(storage, snapshot.step)
        raise


def _write_tensors(
    storage: Storage, snapshot: Snapshot, group: dist.ProcessGroup, threads: int, checksums: bool
) -> dict[str, FileRecord]:
    writer = storage.tensor_writer(snapshot.step, threads=threads, checksums=checksums)
    with _without_crc32():
        dcp.save(
            as_entries(snapshot.tensors),
            storage_writer=writer,
            planner=EntrySavePlanner(snapshot.hold, finite_prefix=WEIGHTS_PREFIX),
            process_group=group,
        )
    return dict(writer.files)


def _record(
    snapshot: Snapshot, world_size: int, components: tuple[str, ...], files: dict[str, FileRecord]
) -> CommitRecord:
    return CommitRecord(
        format_version=FORMAT_VERSION,
        step=snapshot.step,
        world_size=world_size,
        components=list(components),
        files=files,
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": version("transformers"),
            "tailrace": version("tailrace"),
        },
        config_digest=digest_config(snapshot.config),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _discard(storage: Storage, step: int) -> str:
    free = storage.free_bytes()
    try:
        storage.discard(step)
    except OSError as error:
        return f"; what was written of it cannot be removed: {error.strerror}"
    return "" if free is None else f", {format_bytes(free)} were free when it stopped"


def _encode(value: Mapping[str, Any]) -> bytes:
    # NaN would be written as something that is no JSON, or as null: a counter that is NaN is a defect.
    return json.dumps(value, indent=1, allow_nan=False).encode()


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch computes a CRC-32 per tensor on one core, which halves the rate; the checksum of the file
    replaces it.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
