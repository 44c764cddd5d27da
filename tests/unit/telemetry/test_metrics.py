"""The metrics file and what reads it; trackers that fail."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import DataError, RunFolderError
from telemetry.metrics import JsonlSink, Metrics, Value, read_metrics


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _strict_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def _write(path: Path, attempt: int, records: list[tuple[int, dict[str, Value]]]) -> None:
    with Metrics([JsonlSink(path, attempt=attempt)]) as metrics:
        for step, values in records:
            metrics.log(step, values)


class _Recorder:
    """A sink that keeps what it gets, and fails where it is told to."""

    def __init__(self, *, is_vital: bool, fails: bool = False) -> None:
        self.name = "recorder"
        self.is_vital = is_vital
        self.fails = fails
        self.records: list[tuple[int, dict[str, Value]]] = []
        self.closed_as_failed: bool | None = None

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        if self.fails:
            raise ConnectionError("no route to host")
        self.records.append((step, dict(values)))

    def close(self, *, failed: bool) -> None:
        self.closed_as_failed = failed


def test_every_line_is_strict_json_and_a_non_finite_value_is_null_with_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values: dict[str, Value] = {"loss": float("nan"), "a": float("inf"), "b": float("-inf"), "lr": 0.5}
    _write(path, 1, [(1, values)])
    (record,) = _strict_lines(path)
    assert record["loss"] is None and record["loss/non_finite"] == "nan"
    assert record["a"] is None and record["a/non_finite"] == "inf"
    assert record["b"] is None and record["b/non_finite"] == "-inf"
    assert record["lr"] == 0.5 and "lr/non_finite" not in record
    assert record["step"] == 1 and record["attempt"] == 1 and record["time"] > 1.7e9


def test_a_record_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os; from pathlib import Path; from telemetry.metrics import JsonlSink, Metrics\n"
        f"Metrics([JsonlSink(Path({str(path)!r}), attempt=1)]).log(1, {{'loss': 2.0}}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 9
    assert [record["loss"] for record in read_metrics(path)] == [2.0]


def test_steps_done_again_after_a_crash_appear_once_as_the_last_attempt_saw_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, [(step, {"loss": float(step)}) for step in range(1, 6)])
    _write(path, 2, [(step, {"loss": 10.0 * step}) for step in (4, 5, 6)])
    assert len(_strict_lines(path)) == 8
    steps = read_metrics(path)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in steps] == [1.0, 2.0, 3.0, 40.0, 50.0, 60.0]
    assert [record["attempt"] for record in steps] == [1, 1, 1, 2, 2, 2]


def test_steps_of_a_past_that_was_given_up_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, [(step, {"loss": float(step)}) for step in range(1, 6)])
    _write(path, 2, [(3, {"loss": 30.0})])
    assert [(record["step"], record["loss"]) for record in read_metrics(path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_records_of_one_step_are_merged_and_a_flag_does_not_outlive_its_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, [(1, {"loss": float("nan"), "lr": 0.1}), (1, {"validation/loss": 3.0})])
    assert read_metrics(path)[0]["loss/non_finite"] == "nan"
    _write(path, 2, [(1, {"loss": 2.0})])
    (step,) = read_metrics(path)
    assert (step["loss"], step["lr"], step["validation/loss"]) == (2.0, 0.1, 3.0)
    assert "loss/non_finite" not in step


@pytest.mark.parametrize(
    ("tail", "expected_steps"),
    [
        (b'{"step": 3, "time": 1.0, "att', [1, 2, 4]),
        (b"\x00\x00\x00\x00", [1, 2, 4]),
        (b'{"step": 3, "time": 1.0, "attempt": 1}', [1, 2, 3, 4]),
    ],
    ids=["cut off", "zeros", "whole but without newline"],
)
def test_a_torn_last_line_costs_only_itself(
    tmp_path: Path, tail: bytes, expected_steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, [(1, {}), (2, {})])
    with path.open("ab") as file:
        file.write(tail)
    assert [record["step"] for record in read_metrics(path)] == expected_steps[:-1]
    with caplog.at_level(logging.WARNING):
        sink = JsonlSink(path, attempt=2)
    assert sink.num_records == len(expected_steps) - 1
    assert ("was cut off" in caplog.text) == (3 not in expected_steps)
    sink.log(4, {})
    sink.close(failed=False)
    assert [record["step"] for record in _strict_lines(path)] == expected_steps
    assert [record["step"] for record in read_metrics(path)] == expected_steps


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 1, [(1, {}), (2, {})])
    path.write_text(path.read_text().replace('{"step": 1', '{"loss": NaN, "step": 1'))
    with pytest.raises(DataError, match="line 1"):
        read_metrics(path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        read_metrics(tmp_path / "nowhere.jsonl")


def test_a_full_disk_ends_the_run_with_a_readable_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    metrics = Metrics([JsonlSink(path, attempt=1)])
    with pytest.raises(RunFolderError, match="No space left on device"):
        metrics.log(1, {"loss": 1.0})
    metrics.close()


def test_an_unwritable_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"file/metrics\.jsonl"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl", attempt=1)


def test_a_tracker_that_fails_is_said_once_and_counted_and_the_others_get_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, healthy = _Recorder(is_vital=False, fails=True), _Recorder(is_vital=False)
    with caplog.at_level(logging.WARNING):
        metrics = Metrics([failing, JsonlSink(tmp_path / "metrics.jsonl", attempt=1), healthy])
        for step in (1, 2, 3):
            metrics.log(step, {"loss": 1.0})
        assert caplog.text.count("no route to host") == 1
        metrics.close()
    assert metrics.num_lost == {"recorder": 3}
    assert "lost 3 records" in caplog.text
    assert [step for step, _ in healthy.records] == [1, 2, 3]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_a_vital_sink_that_fails_raises() -> None:
    with pytest.raises(ConnectionError):
        Metrics([_Recorder(is_vital=True, fails=True)]).log(1, {})


@pytest.mark.parametrize("fails", [False, True])
def test_sinks_learn_whether_the_run_failed(fails: bool) -> None:
    sink = _Recorder(is_vital=True)
    try:
        with Metrics([sink]):
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert sink.closed_as_failed is fails


def test_numpy_numbers_are_taken_as_plain_ones() -> None:
    sink = _Recorder(is_vital=True)
    given: dict[str, Any] = {"a": np.float32(0.5), "b": np.int64(3), "c": True, "d": "x", "e": None}
    Metrics([sink]).log(1, given)
    ((_, values),) = sink.records
    assert values == {"a": 0.5, "b": 3, "c": True, "d": "x", "e": None}
    assert [type(values[key]) for key in "abc"] == [float, int, bool]


def test_what_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="`loss` is a list"):
        Metrics([]).log(1, {"loss": [1.0]})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`attempt`"):
        Metrics([]).log(1, {"attempt": 3})
