"""Reading one committed step: into the parts of a run on any number of ranks, or as whole tensors in one
process.

DCP casts a wrong dtype silently and reads damaged bytes as they are, so shapes, dtypes and checksums are
checked before anything is changed.
"""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from contract.commit import verify_files
from contract.errors import CheckpointError
from contract.record import CommitRecord
from contract.store import Folder
from trainer.checkpoint import rng
from trainer.checkpoint.agreement import FAILURES, explain, on_all_ranks
from trainer.checkpoint.base import Companion, Part
from trainer.checkpoint.storage import open_reader, read_file
from trainer.checkpoint.tensors import EntryLoadPlanner, as_entries
from trainer.checkpoint.writer import CONFIG_FILE, STATE_FILE
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process

logger = logging.getLogger(__name__)

_SHOWN_PROBLEMS = 5


def read_values(path: Folder) -> dict[str, dict[str, Any]]:
    """The JSON values of every part in the step folder `path`.

    Raises:
        CheckpointError: they cannot be read.
    """
    parts = _read_json(path, STATE_FILE).get("parts")
    if not isinstance(parts, dict):
        raise CheckpointError(f"{path}: {STATE_FILE} holds no parts")
    return parts


def read_config(path: Folder) -> dict[str, Any]:
    """The resolved configuration of the run that wrote the step folder `path`.

    Raises:
        CheckpointError: it cannot be read.
    """
    return _read_json(path, CONFIG_FILE)


def read_tensors(path: Folder, part: str) -> dict[str, torch.Tensor]:
    """All tensors of one part as whole CPU tensors, in this process alone (no process group).

    Raises:
        CheckpointError: the step holds no such part, or cannot be read.
    """
    prefix = f"{part}."
    stored = {name: meta for name, meta in _stored_tensors(path).items() if name.startswith(prefix)}
    if not stored:
        raise CheckpointError(f"{path} holds no tensors of part {part!r}")
    tensors = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in stored.items()}
    targets = as_entries({name: LogicalTensor.replicated(tensor) for name, tensor in tensors.items()})
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(targets, storage_reader=open_reader(path), planner=EntryLoadPlanner(), no_dist=True)
    except FAILURES as error:
        raise CheckpointError(f"{path} cannot be read: {explain(error)}") from error
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def load_step(
    path: Folder, record: CommitRecord, parts: Mapping[str, Part], process: Process, *, with_rng: bool
) -> None:
    """Fill `parts` from the step folder `path`; collective. Every file is read and compared with its checksum
    first.

    Args:
        with_rng: also restore the random generators (at another world size: seed them anew, and say so).

    Raises:
        CheckpointError: the step is damaged, or does not fit what the parts expect; raised on every rank.
    """
    group, what = process.control_group, f"{path} cannot be loaded"
    # The work is shared out: together the ranks read every file once.
    names = sorted(record.files)[process.rank :: process.world_size]
    on_all_ranks(
        group, what, lambda: _refuse(verify_files(path, {name: record.files[name] for name in names}))
    )
    targets: dict[str, LogicalTensor] = {}
    on_all_ranks(group, what, lambda: targets.update(_allocate(path, record, parts, process, with_rng)))
    on_all_ranks(
        group,
        what,
        lambda: dcp.load(
            as_entries(targets),
            storage_reader=open_reader(path),
            planner=EntryLoadPlanner(),
            process_group=group,
        ),
    )
    on_all_ranks(group, what, lambda: _take_over(path, parts))
    if with_rng:
        # Last, because a part may draw random numbers while it takes its values over.
        _set_rng(targets, record, process)


def load_companions(path: Folder, companions: Mapping[str, Companion], process: Process) -> None:
    """Give each companion what the step folder `path` holds of it; collective, after `load_step`.

    Raises:
        CheckpointError: it cannot be read; raised on every rank.
    """

    def load() -> None:
        for component, companion in companions.items():
            companion.loaded(read_file(path, STATE_FILE, component))

    on_all_ranks(process.control_group, f"{path} cannot be loaded", load)


def _allocate(
    path: Folder, record: CommitRecord, parts: Mapping[str, Part], process: Process, with_rng: bool
) -> dict[str, LogicalTensor]:
    stored = _stored_tensors(path)
    targets: dict[str, LogicalTensor] = {}
    for part_name, part in parts.items():
        prefix = f"{part_name}."
        names = [name.removeprefix(prefix) for name in stored if name.startswith(prefix)]
        targets |= {f"{prefix}{name}": tensor for name, tensor in part.tensors_to_load(names).items()}
    problems = []
    for name, tensor in targets.items():
        if name not in stored:
            problems.append(f"{name} is not in it")
            continue
        meta = stored[name]
        if tuple(meta.size) != tensor.shape:
            problems.append(f"{name} has shape {tuple(meta.size)} in it, {tensor.shape} in this run")
        elif meta.properties.dtype != tensor.dtype:
            problems.append(f"{name} has type {meta.properties.dtype} in it, {tensor.dtype} in this run")
    _refuse(problems)
    if with_rng:
        name = _rng_name(record, process)
        if name not in stored:
            raise CheckpointError(f"{name} is not in it")
        targets[name] = LogicalTensor.replicated(torch.empty(stored[name].size, dtype=torch.uint8))
    return targets


def _take_over(path: Folder, parts: Mapping[str, Part]) -> None:
    values = read_values(path)
    for name, part in parts.items():
        part.loaded(values[name])


def _rng_name(record: CommitRecord, process: Process) -> str:
    return f"{rng.PREFIX}{process.rank if record.world_size == process.world_size else 0}"


def _set_rng(targets: Mapping[str, LogicalTensor], record: CommitRecord, process: Process) -> None:
    state = targets[_rng_name(record, process)].pieces[0].tensor
    if record.world_size == process.world_size:
        rng.restore(state, process.device)
        return
    rng.reseed(state, process.rank, process.world_size)
    if process.is_main:
        logger.warning(
            "the checkpoint was written by %d processes and is loaded by %d: random generators cannot be "
            "carried over and were seeded anew, from the saved state of rank 0",
            record.world_size,
            process.world_size,
        )


def _stored_tensors(path: Folder) -> dict[str, TensorStorageMetadata]:
    try:
        metadata = open_reader(path).read_metadata()
    except (OSError, EOFError, AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: the list of its tensors cannot be read: {explain(error)}") from error
    return {
        name: meta
        for name, meta in metadata.state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata)
    }


def _read_json(path: Folder, name: str) -> dict[str, Any]:
    try:
        content = json.loads(read_file(path, name))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {explain(error)}") from error
    return content if isinstance(content, dict) else {}


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise CheckpointError("; ".join(problems[:_SHOWN_PROBLEMS]) + more)
