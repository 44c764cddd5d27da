"""Metrics of a run: handed to every sink; the JSONL file is the source of truth, trackers are copies.

A record of `metrics.jsonl` is one strict JSON object on one line:

    {"step": 12, "time": 1764435231.2, "attempt": 1, "loss": 2.31, "lr": 1e-05, ...}

`time` is in seconds since 1970 (UTC); `attempt` counts the processes that worked on the run, from 1. JSON has
no NaN: a value that is not finite is null, and `<key>/non_finite` beside it says "nan", "inf" or "-inf".

Invariants: a record is one write to the file and is never changed; records are only appended. A run that is
resumed after a crash does steps again: `read_metrics` shows each step once, as the last attempt saw it. Names
of metrics and what they mean belong to those who log them.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from contract.errors import DataError, RunFolderError

logger = logging.getLogger(__name__)

Value = float | int | str | bool | None

_RESERVED = frozenset({"step", "time", "attempt"})


class MetricSink(Protocol):
    """A place that metrics go to."""

    name: str
    """For messages."""
    is_vital: bool
    """Whether a failure ends the run (the source of truth) or is counted (a copy)."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Take one record. May raise anything."""
        ...

    def close(self, *, failed: bool) -> None:
        """Flush and close; `failed` says that the run ended by an error. May raise anything."""
        ...


class Metrics:
    """Hands each record to all sinks. One thread. A context manager that closes them, in reverse order."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)
        self.num_lost: dict[str, int] = {}
        """Records that a sink which is not vital failed to take, by the sink's name."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Record `values` of `step`; several records of one step add up, the last value of a key wins.

        Raises:
            TypeError: a value is no number, string, bool or None (a tensor would wait for the device here).
            ValueError: a key is `step`, `time` or `attempt`.
            RunFolderError: the metrics file cannot be written.
        """
        plain = {key: _plain_value(key, value) for key, value in values.items()}
        for sink in self._sinks:
            try:
                sink.log(step, plain)
            except Exception as error:
                if sink.is_vital:
                    raise
                self._count_failure(sink, error)

    def close(self, *, failed: bool = False) -> None:
        """Close every sink, the last first; a vital one's error is raised after all are closed."""
        vital_error: Exception | None = None
        for sink in reversed(self._sinks):
            try:
                sink.close(failed=failed)
            except Exception as error:
                if sink.is_vital:
                    vital_error = error
                else:
                    logger.warning("%s could not be closed: %s", sink.name, error)
        for name, count in self.num_lost.items():
            logger.warning("%s lost %d records; metrics.jsonl has all of them", name, count)
        if vital_error is not None:
            raise vital_error

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _count_failure(self, sink: MetricSink, error: Exception) -> None:
        if sink.name not in self.num_lost:
            self.num_lost[sink.name] = 0
            logger.warning(
                "%s failed (%s: %s); training goes on, later failures are only counted",
                sink.name,
                type(error).__name__,
                error,
            )
        self.num_lost[sink.name] += 1


class JsonlSink:
    """Appends records to a JSONL file. Vital: a full disk ends the run."""

    name = "metrics.jsonl"
    is_vital = True

    def __init__(self, path: Path, *, attempt: int) -> None:
        """Open `path` for appending; its folder is made.

        A torn last line (the process was killed, or the disk was full, in the middle of a record) is removed,
        so that every line of the file stays valid JSON.

        Args:
            attempt: number of this attempt at the run, from 1.

        Raises:
            RunFolderError: the file cannot be opened.
        """
        self._path = path
        self._attempt = attempt
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.num_records = _mend_tail(path)
            """Records in the file, those of earlier attempts included."""
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        record = {"step": step, "time": time.time(), "attempt": self._attempt, **_without_non_finite(values)}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise self._unwritable(error) from error
        self.num_records += 1

    def close(self, *, failed: bool) -> None:
        self._file.close()

    def _unwritable(self, error: OSError) -> RunFolderError:
        return RunFolderError(
            f"cannot write metrics to {self._path}: {error.strerror}; free space or make the folder "
            "writable, then go on with --resume"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a run in order, each once: what a metrics file says after "the last one wins".

    Records of one step are merged, a later value of a key replaces an earlier one. Where an attempt begins,
    what earlier attempts recorded of later steps is void: it was done again, or belongs to a past that was
    given up. A torn last line is ignored. `attempt` and `time` are those of a step's last record.

    Raises:
        DataError: there is no such file, or a line other than the last is no JSON object with step and
            attempt.
    """
    if not path.is_file():
        raise DataError(f"there is no metrics file at {path}; give the path of a run's metrics.jsonl")
    steps: dict[int, dict[str, Any]] = {}
    current_attempt: int | None = None
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parse_record(line)
        if record is None:
            if number == len(lines):
                break
            raise DataError(
                f"{path}, line {number}: {line[:80]!r} is no metrics record (a JSON object with `step` and "
                "`attempt`); the file was changed by something else: remove that line"
            )
        if record["attempt"] != current_attempt:
            current_attempt = record["attempt"]
            steps = {step: values for step, values in steps.items() if step <= record["step"]}
        _merge_record(steps.setdefault(record["step"], {}), record)
    return [steps[step] for step in sorted(steps)]


def _merge_record(into: dict[str, Any], record: Mapping[str, Any]) -> None:
    for key in record:
        # The flag of an earlier value must not outlive that value.
        into.pop(f"{key}/non_finite", None)
    into.update(record)


def _plain_value(key: str, value: Any) -> Value:
    if key in _RESERVED:
        raise ValueError(f"`{key}` is set by the metrics file itself; name the metric otherwise")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"metric `{key}` is a {type(value).__name__}; pass a number, a string, a bool or None")


def _without_non_finite(values: Mapping[str, Value]) -> dict[str, Value]:
    plain: dict[str, Value] = {}
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            plain[key] = None
            plain[f"{key}/non_finite"] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        else:
            plain[key] = value
    return plain


def _mend_tail(path: Path) -> int:
    """Remove a torn last line, or end a whole one that lacks its newline; returns the number of records."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with path.open("r+b") as file:
        content = file.read()
        num_records = content.count(b"\n")
        tail = content[content.rfind(b"\n") + 1 :]
        if not tail:
            return num_records
        if _parse_record(tail) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            return num_records + 1
        file.truncate(len(content) - len(tail))
    logger.warning(
        "%s: removed a last record that was cut off when the previous attempt ended: %r", path, tail[:80]
    )
    return num_records


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    is_record = isinstance(record.get("step"), int) and isinstance(record.get("attempt"), int)
    return record if is_record else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
