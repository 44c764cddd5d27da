"""Trackers keep a run together over its attempts, and need no network offline."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from telemetry.trackers import TensorboardSink
from tests.support.wandb_files import read_records

# A process per attempt, as in a real run: W&B keeps state of its own in the process. Any use of the network
# fails.
_ATTEMPT = """
import json, logging, socket, sys
from pathlib import Path
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
arguments = json.loads(sys.argv[1])

def refuse(*_):
    raise AssertionError("network")
if arguments["offline"]:
    socket.getaddrinfo = refuse

from telemetry.trackers import WandbSink
sink = WandbSink(
    Path(arguments["folder"]),
    project="p",
    run_id=arguments["run_id"],
    offline=arguments["offline"],
    num_earlier_records=arguments["num_earlier_records"],
    config={"a": {"b": 1}},
    init_timeout_seconds=2,
)
for step, values in arguments["records"]:
    sink.log(step, values)
print(json.dumps([sink.run_id, sink.is_offline, sink.url]))
if arguments["crashes"]:
    import os
    sys.stdout.flush()
    os._exit(9)
sink.close(failed=False)
"""


def _attempt(
    folder: Path, *, run_id: str | None, records: list[tuple[int, dict[str, Any]]], **options: Any
) -> tuple[str, bool, str | None, str]:
    arguments = {
        "folder": str(folder),
        "run_id": run_id,
        "records": records,
        "offline": options.get("offline", True),
        "num_earlier_records": options.get("num_earlier_records", 0),
        "crashes": options.get("crashes", False),
    }
    # No proxy and no key of this machine may take part; a closed port on loopback stands for the server.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    environment.update(options.get("environment", {}))
    result = subprocess.run(
        [sys.executable, "-c", _ATTEMPT, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    if "ConfigError" in result.stderr:
        return ("", False, None, result.stderr)
    assert result.returncode == (9 if arguments["crashes"] else 0), result.stdout + result.stderr
    *messages, last = result.stdout.splitlines()
    return (*json.loads(last), "\n".join(messages))


def _history(folder: Path) -> list[Mapping[str, Any]]:
    """What all attempts logged, in the order of their folders; `_step` is W&B's internal step."""
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in read_records(path):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows


def test_offline_wandb_continues_the_same_run_and_keeps_steps_done_again(tmp_path: Path) -> None:
    first = [(step, {"loss": float(step)}) for step in (1, 2, 3)]
    run_id, is_offline, url, _ = _attempt(tmp_path, run_id=None, records=first)
    assert run_id and is_offline and url is None
    again = [(3, {"loss": 30.0, "note": "x", "nothing": None}), (4, {"loss": 40.0})]
    assert _attempt(tmp_path, run_id=run_id, records=again, num_earlier_records=3)[0] == run_id

    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(run_id) for folder in folders)
    rows = _history(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (3, 30.0),
        (4, 40.0),
    ]
    # W&B drops a record whose internal step is not greater than the last one's.
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4]


def test_wandb_without_a_login_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    *_, error = _attempt(tmp_path, run_id=None, records=[], offline=False)
    assert "wandb login" in error and "--wandb.offline" in error


def test_a_wandb_server_out_of_reach_turns_the_attempt_offline_under_the_same_id(tmp_path: Path) -> None:
    run_id, is_offline, _, messages = _attempt(
        tmp_path,
        run_id="abc12345",
        records=[(1, {"loss": 1.0})],
        offline=False,
        environment={"WANDB_API_KEY": "0" * 40},
    )
    assert run_id == "abc12345" and is_offline
    assert "cannot be reached" in messages and "wandb sync" in messages
    assert [row["loss"] for row in _history(tmp_path)] == [1.0]


def test_tensorboard_shows_the_last_attempt_of_steps_done_again(tmp_path: Path) -> None:
    for first_step, values in ((1, [1.0, 2.0, 3.0, 4.0]), (3, [30.0, 40.0, 50.0])):
        sink = TensorboardSink(tmp_path, flush_seconds=30, first_step=first_step)
        for step, loss in enumerate(values, start=first_step):
            sink.log(step, {"loss": loss, "flag": True, "none": None, "text": "hello"})
        sink.close(failed=False)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert set(events.Tags()["scalars"]) == {"loss", "flag"}
