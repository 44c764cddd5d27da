"""From files and Hub data sets to rows, each with the place where it stands.

Owns which files a path means, their formats, and what identifies their content without reading it. A row that
cannot be decoded is handed on as a `RowError` in its place, so that one bad line hides no other; what a row
must hold is left to `conversation`.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import DataError
from trainer.config.data import ChatSourceConfig
from trainer.source.conversation import RowError

SUFFIXES = (".jsonl", ".json", ".parquet")
_PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read.

    Attributes:
        place: where it stands, for messages: `file:line`, or `file:row N` (counted from 1) where lines mean
            nothing.
        value: the decoded row, or why it could not be decoded.
    """

    place: str
    value: Any


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Local files, in the order in which they are read."""

    paths: tuple[Path, ...]

    def fingerprint(self) -> list[list[Any]]:
        """JSON value that changes when a file does: path, size in bytes and time of change of each."""
        stats = [(path.resolve(), path.stat()) for path in self.paths]
        return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]

    def describe(self) -> str:
        """The files, for the start-up summary."""
        return (
            str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} files, {self.paths[0]} first"
        )

    def rows(self) -> Iterator[Row]:
        """All rows; blank lines are none.

        Raises:
            DataError: a file cannot be read at all (a damaged Parquet file, a `.json` array that does not
                parse).
        """
        for path in self.paths:
            try:
                if path.suffix == ".parquet":
                    yield from _read_parquet(path)
                elif path.suffix == ".json" and _starts_with_bracket(path):
                    yield from _read_json_array(path)
                else:
                    yield from _read_json_lines(path)
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class HubRows:
    """A Hub data set."""

    name: str
    data: Any
    """A `datasets.Dataset`."""

    def fingerprint(self) -> list[Any]:
        """JSON value that changes when the data set does."""
        return [self.name, len(self.data), self.data._fingerprint]

    def describe(self) -> str:
        """The data set, for the start-up summary."""
        return self.name

    def rows(self) -> Iterator[Row]:
        """All rows."""
        for index, value in enumerate(self.data):
            yield Row(f"{self.name}:row {index + 1}", _drop_nulls(value))


def open_rows(
    config: ChatSourceConfig, *, section: str = "data", load_dataset: Callable[..., Any] | None = None
) -> RowFiles | HubRows:
    """Find what `config.path` names.

    Args:
        config: path, and split, subset and revision of a Hub data set.
        section: section of the configuration, for messages.
        load_dataset: what loads a Hub data set; None is `datasets.load_dataset`.

    Raises:
        DataError: no such file, an empty folder, a glob that matches nothing, or the data set cannot be
            loaded.
    """
    path = Path(config.path).expanduser()
    is_glob = any(character in config.path for character in "*?[")
    if not (config.is_local or is_glob or path.exists()):
        return _open_hub(config, section, load_dataset)
    if not config.is_local and (config.split != "train" or config.subset or config.revision):
        raise DataError(
            f"{section}.path = {config.path!r} is a local path, but {section}.split, subset or revision "
            f"is set, which "
            "are for Hub data sets; remove them"
        )
    if path.exists():
        found = [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file())
    else:
        found = sorted(Path(item) for item in glob.glob(str(path), recursive=True)) if is_glob else []
    if not found:
        what = "contains no file" if path.is_dir() else "matches no file" if is_glob else "does not exist"
        raise DataError(f"{section}.path = {config.path!r} {what}; {_valid(section)}")
    files = [item for item in found if item.suffix in SUFFIXES]
    if not files:
        raise DataError(
            f"{section}.path = {config.path!r} holds no {', '.join(SUFFIXES)} file; {_valid(section)}"
        )
    return RowFiles(tuple(files))


def _valid(section: str) -> str:
    return (
        f"set {section}.path to a {', '.join(SUFFIXES)} file, a folder or glob of such files, or a Hub data "
        f"set id"
    )


def _open_hub(config: ChatSourceConfig, section: str, load_dataset: Callable[..., Any] | None) -> HubRows:
    if load_dataset is None:
        from datasets import (
            load_dataset as load_from_hub,  # imported here: it takes a second, local files need none
        )

        load_dataset = load_from_hub
    try:
        data = load_dataset(config.path, config.subset, split=config.split, revision=config.revision)
    except Exception as error:  # the library raises a dozen types for what is one fact here
        raise DataError(
            f"{section}.path = {config.path!r} (subset {config.subset!r}, split {config.split!r}, revision "
            f"{config.revision!r}) is no local path and cannot be loaded from the Hub: "
            f"{type(error).__name__}: {error}. "
            f"{_valid(section).capitalize()}"
        ) from error
    parts = [config.path, config.subset, config.split, config.revision]
    return HubRows(":".join(part for part in parts if part), data)


def _read_json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield Row(f"{path}:{number}", _decode_line(line))


def _decode_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError("not UTF-8", f"not UTF-8 text at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return RowError("bad JSON", f"not valid JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return RowError("bad JSON", "not valid JSON: nested too deeply")
    except ValueError as error:  # a number of thousands of digits
        return RowError("bad JSON", f"not usable JSON: {error}")


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        for line in file:
            if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                return text.startswith(b"[")
    return False


def _read_json_array(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not a JSON array of rows: {error}; .jsonl with one row a line says more"
        ) from error
    for index, value in enumerate(rows):
        yield Row(f"{path}:row {index + 1}", value)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa  # imported here: most runs read JSON
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}:row {number}", _drop_nulls(value))
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _drop_nulls(value: Any) -> Any:
    """Without the nulls by which columnar formats say that an object lacks a field of another one."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value
