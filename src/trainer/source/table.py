"""Tokenised rows in flat arrays, in memory or on disk.

A table on disk is a folder that appears under its final name in one rename, complete and on stable storage,
so any
number of processes may build the same one at a time: the first to finish wins, the others take its result. It
    is read
through the page cache, which ranks on one machine share.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import uuid
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from contract.batch import Sample
from contract.errors import DataError
from trainer.source.render import Rendered

COMPONENT = "ce"
_META = "table.json"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """All rows that are trained on, in the order of the source.

    Attributes:
        tokens: [N] int32, the tokens of all rows end to end.
        trainable: [N] bool, True where the token carries loss.
        offsets: [R + 1] int64; row r is `offsets[r]:offsets[r + 1]`.
        sample_ids: [R] int64 number of the row in the source, dropped rows counted.
        digest: identity of the content of all of these.
        report: what the builder of the table noted; JSON values.
    """

    tokens: npt.NDArray[np.int32]
    trainable: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    sample_ids: npt.NDArray[np.int64]
    digest: str
    report: dict[str, Any]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.sample_ids)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[R] tokens of each row."""
        return np.diff(self.offsets)

    def sample(self, row: int) -> Sample:
        """Row `row`, with weight 1 for each token that carries loss."""
        span = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        tokens = np.asarray(self.tokens[span], dtype=np.int64)
        weights = {COMPONENT: np.asarray(self.trainable[span], dtype=np.float32)}
        return Sample(tokens, weights, int(self.sample_ids[row]))


class TableWriter:
    """Takes rows one by one; holds a few bytes per row in memory, and writes tokens as they come."""

    def __init__(self, tokens: BinaryIO, trainable: BinaryIO) -> None:
        self._tokens, self._trainable = tokens, trainable
        self._offsets, self._sample_ids = array("q", [0]), array("q")
        self._digest = hashlib.blake2b(digest_size=16)

    def append(self, rendered: Rendered, sample_id: int) -> None:
        """Add a row; `sample_id` is its number in the source."""
        tokens = rendered.tokens.astype("<i4").tobytes()
        trainable = rendered.trainable.astype(np.uint8).tobytes()
        self._tokens.write(tokens)
        self._trainable.write(trainable)
        self._digest.update(
            len(trainable).to_bytes(8, "little") + sample_id.to_bytes(8, "little") + tokens + trainable
        )
        self._offsets.append(self._offsets[-1] + len(trainable))
        self._sample_ids.append(sample_id)

    def __len__(self) -> int:
        """Rows so far."""
        return len(self._sample_ids)

    def finish(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], str]:
        """Offsets, sample ids and digest of the rows."""
        return (
            np.array(self._offsets, dtype=np.int64),
            np.array(self._sample_ids, dtype=np.int64),
            self._digest.hexdigest(),
        )


Fill = Callable[[TableWriter], dict[str, Any]]
"""Appends all rows to the writer; returns the report. If it raises, nothing of the table is left behind."""


def build_in_memory(fill: Fill) -> TokenTable:
    """Build a table that is not kept."""
    tokens, trainable = io.BytesIO(), io.BytesIO()
    writer = TableWriter(tokens, trainable)
    report = fill(writer)
    offsets, sample_ids, digest = writer.finish()
    return TokenTable(
        np.frombuffer(tokens.getbuffer(), dtype="<i4"),
        np.frombuffer(trainable.getbuffer(), dtype=np.bool_),
        offsets,
        sample_ids,
        digest,
        report,
    )


def build_on_disk(folder: Path, fill: Fill) -> TokenTable:
    """The table in `folder`, built first if it is not there.

    Raises:
        DataError: the folder cannot be written.
    """
    if (found := open_table(folder)) is not None:
        return found
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir(parents=True)
        try:
            _write(partial, fill)
            _move_into_place(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"tokenised rows cannot be written to {folder}: {error.strerror or error}; free space there, "
            f"or set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
    table = open_table(folder)
    if table is None:
        raise DataError(
            f"tokenised rows in {folder} are damaged right after they were written; check the disk"
        )
    return table


def open_table(folder: Path) -> TokenTable | None:
    """The table in `folder`, or None if there is none or a file of it has lost bytes."""
    try:
        meta = json.loads((folder / _META).read_text())
        offsets, sample_ids = (np.load(folder / name) for name in ("offsets.npy", "sample_ids.npy"))
        num_rows, num_tokens = meta["num_rows"], meta["num_tokens"]
        if len(sample_ids) != num_rows or len(offsets) != num_rows + 1 or offsets[-1] != num_tokens:
            return None
        tokens = np.memmap(folder / "tokens.bin", dtype="<i4", mode="r")
        trainable = np.memmap(folder / "trainable.bin", dtype=np.bool_, mode="r")
    except (OSError, ValueError, KeyError, EOFError):
        return None
    if len(tokens) != num_tokens or len(trainable) != num_tokens:
        return None
    return TokenTable(tokens, trainable, offsets, sample_ids, meta["digest"], meta["report"])


def _write(folder: Path, fill: Fill) -> None:
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trainable.bin").open("wb") as trainable:
        writer = TableWriter(tokens, trainable)
        report = fill(writer)
        _flush(tokens)
        _flush(trainable)
    offsets, sample_ids, digest = writer.finish()
    for name, values in (("offsets.npy", offsets), ("sample_ids.npy", sample_ids)):
        with (folder / name).open("wb") as file:
            np.save(file, values)
            _flush(file)
    meta = {"num_rows": len(sample_ids), "num_tokens": int(offsets[-1]), "digest": digest, "report": report}
    with (folder / _META).open("wb") as file:
        file.write(json.dumps(meta).encode())
        _flush(file)


def _flush(file: BinaryIO) -> None:
    """To stable storage before the rename: after a power cut the folder may otherwise hold empty files."""
    file.flush()
    os.fsync(file.fileno())


def _move_into_place(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if open_table(folder) is not None:  # another process was first
            return
        # What lies there is damaged. Moved aside rather than deleted in place: another process may be at it
        # too.
        damaged = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
        partial.rename(folder)
