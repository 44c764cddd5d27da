"""One write of one snapshot: files of all ranks, then the commit. Runs on whichever thread it is called from.

All its collectives are on the group it is given, so that a write in the background never meets the training
step. A rank that fails is learnt by all: the write then removes what it wrote and did not commit, and raises
everywhere.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from contract.errors import CheckpointError
from contract.record import FORMAT_VERSION, CommitRecord, FileRecord, digest_config
from trainer.checkpoint.agreement import explain, on_all_ranks
from trainer.checkpoint.base import Snapshot, count_bytes
from trainer.checkpoint.storage import COMPONENT, Storage
from trainer.checkpoint.tensor_writer import TensorWriter
from trainer.checkpoint.tensors import EntrySavePlanner, as_entries
from trainer.parallel.layout import LogicalTensor

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
"""In every component: what it holds beside tensors."""
CONFIG_FILE = "config.json"
WEIGHTS_PREFIX = "model."
"""Names of the tensors of part `model`: its parameters must be finite in every save."""

_OVERHEAD = 1.02
_OVERHEAD_BYTES = 1 << 20
"""Room for metadata, names and padding beside the tensors: a share, and a constant."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed step; the same on all ranks, but for the seconds.

    Attributes:
        num_bytes: of the files of tensors, over all ranks. Without DCP's list of them, whose length depends
            on which thread wrote what.
        write_seconds: from the first file to the commit.
        committed: this and the run's other steps that the storage holds now, ascending; None if it could not
            be asked.
    """

    step: int
    num_bytes: int
    write_seconds: float
    committed: tuple[int, ...] | None


def write_snapshot(
    storage: Storage,
    snapshot: Snapshot,
    group: dist.ProcessGroup,
    *,
    threads: int,
    checksums: bool,
    own_steps: Collection[int] = (),
    may_be_infinite: Collection[str] = (),
) -> SaveReport:
    """Write and commit; collective over `group`.

    Args:
        own_steps: of this run, of which the report says whether they are committed.
        may_be_infinite: tensors of part `model` that need not be finite, by `model.<name>`.

    Raises:
        CheckpointError: it failed on some rank, and every rank raises. Nothing is committed, unless the
            failure came after the rename that commits (a disk that does not make it durable, a rank that is
            lost just then): `own_steps` of a later write finds out.
    """
    start = time.perf_counter()
    is_coordinator = dist.get_rank(group) == 0
    needed = bytes_needed(snapshot.tensors)
    what = f"checkpoint of step {snapshot.step} was not saved, earlier ones are unchanged"
    small_files = on_all_ranks(
        group, what, lambda: _begin(storage, snapshot, needed) if is_coordinator else {}
    )
    writers: list[TensorWriter] = []

    def open_writer() -> None:
        writers.append(storage.tensor_writer(snapshot.step, threads=threads, checksums=checksums))

    try:
        # Apart, because a rank that fails here must not miss in the collectives of DCP.
        on_all_ranks(group, what, open_writer)
        # DCP's list of tensors is the last of the trainer's files.
        tensor_files = on_all_ranks(
            group, what, lambda: _write_tensors(writers[0], snapshot, group, may_be_infinite)
        )
        files = {name: file for of_rank in small_files + tensor_files for name, file in of_rank.items()}
        record = _record(snapshot, dist.get_world_size(group), files)
        committed = on_all_ranks(
            group, what, lambda: _commit(storage, record, own_steps) if is_coordinator else None
        )[0]
    except CheckpointError as error:
        # Every rank that lives has left the write by now, or `on_all_ranks` would still wait.
        room = _discard(storage, snapshot.step) if is_coordinator else ""
        raise CheckpointError(
            f"{error} (it needs {format_bytes(needed)} in {storage.describe()}{room})"
        ) from error
    num_bytes = sum(file.size for name, file in record.files.items() if name.endswith(DEFAULT_SUFFIX))
    return SaveReport(snapshot.step, num_bytes, time.perf_counter() - start, committed)


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
        files = storage.write_file(snapshot.step, STATE_FILE, _encode(state))
        files |= storage.write_file(snapshot.step, CONFIG_FILE, _encode(snapshot.config))
        for component, content in snapshot.companions.items():
            files |= storage.write_file(snapshot.step, STATE_FILE, content, component)
        return files
    except Exception:
        _discard(storage, snapshot.step)
        raise


def _write_tensors(
    writer: TensorWriter, snapshot: Snapshot, group: dist.ProcessGroup, may_be_infinite: Collection[str]
) -> dict[str, FileRecord]:
    dcp.save(
        as_entries(snapshot.tensors),
        storage_writer=writer,
        planner=EntrySavePlanner(snapshot.hold, WEIGHTS_PREFIX, may_be_infinite),
        process_group=group,
    )
    if snapshot.hold is not None and snapshot.hold.was_given_up:
        # The training step may have changed what was still to be read.
        raise CheckpointError("it took longer than ckpt.write_timeout_seconds and was given up")
    return dict(writer.files)


def _commit(storage: Storage, record: CommitRecord, own_steps: Collection[int]) -> tuple[int, ...] | None:
    """Commit, and see which of the run's steps there are now: a write that failed may have left one."""
    storage.commit(record.step, record)
    try:
        entries = storage.scan()
    except Exception as error:
        # The step exists, whatever the storage says now: what failed is not the save.
        logger.warning(
            "after the commit of step %d nothing is deleted, as %s cannot be listed: %s",
            record.step,
            storage.describe(),
            explain(error),
        )
        return None
    own = {record.step, *own_steps}
    return tuple(entry.step for entry in entries if entry.state == "committed" and entry.step in own)


def _record(snapshot: Snapshot, world_size: int, files: dict[str, FileRecord]) -> CommitRecord:
    return CommitRecord(
        format_version=FORMAT_VERSION,
        step=snapshot.step,
        world_size=world_size,
        components=[COMPONENT, *snapshot.companions],
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
    """Remove what was written; returns what is to be said of the room, whatever fails here too."""
    try:
        free = storage.free_bytes()
        storage.discard(step)
    except Exception as error:
        return f"; what was written of it cannot be removed: {explain(error)}"
    return "" if free is None else f", {format_bytes(free)} were free when it stopped"


def _encode(value: Mapping[str, Any]) -> bytes:
    # NaN would be written as something that is no JSON, or as null: a counter that is NaN is a defect.
    return json.dumps(value, indent=1, allow_nan=False).encode()
