"""Which positions are done: whatever was under way, no task is skipped and none is done twice."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from contract.errors import CheckpointError, DataError
from orchestrator.plan import Draw, Plan, PlannedSource
from orchestrator.progress import Progress, Snapshot, load_snapshot

SOURCES = (PlannedSource("a", 2.0, 9, "x:Class", {"sizes": (1, 2)}), PlannedSource("b", 1.0, 5))
GROUP_SIZE = 4


def _identity(environment: str, settings: dict[str, object]) -> dict[str, object]:
    return Plan([PlannedSource("a", 2.0, 9, environment, settings), SOURCES[1]], 0).identity(GROUP_SIZE)


def _resume(path: Path) -> Progress:
    identity = Plan(SOURCES, 0).identity(GROUP_SIZE)
    snapshot = load_snapshot(path.parent, identity)
    assert snapshot is not None
    return Progress(Plan(SOURCES, 0, snapshot.counts), GROUP_SIZE, snapshot.outstanding)


def _key(draw: Draw) -> tuple[int, int, int, int]:
    return draw.position, draw.source, draw.task, draw.epoch


@pytest.mark.parametrize("seed", range(30))
def test_after_any_prefix_and_resume_every_task_is_done_exactly_once(seed: int, tmp_path: Path) -> None:
    chance, path = random.Random(seed), tmp_path / "state.json"
    progress = Progress(Plan(SOURCES, 0), GROUP_SIZE)
    path.write_bytes(progress.snapshot(0, {}))
    flying: list[Draw] = []
    done: list[Draw] = []
    committed: list[Draw] = []
    for step in range(1, 400):
        action = chance.choice(["take", "take", "finish", "finish", "give back", "commit", "crash"])
        if action == "take" and len(flying) < 8:
            flying.append(progress.take())
        elif action in ("finish", "give back") and flying:
            draw = flying.pop(chance.randrange(len(flying)))
            if action == "finish":
                progress.finish(draw)
                done.append(draw)
            else:
                progress.give_back(draw)
        elif action == "commit":
            path.write_bytes(progress.snapshot(step, {}))
            committed = list(done)
        elif action == "crash" and chance.random() < 0.2:
            progress, flying, done = _resume(path), [], list(committed)
    # Everything that was begun is brought to its end, before anything new.
    while (outstanding := len(json.loads(progress.snapshot(0, {}))["outstanding"])) or len(done) < 1:
        if outstanding == len(flying):
            while flying:
                progress.finish(flying[-1])
                done.append(flying.pop())
        else:
            flying.append(progress.take())
    plan = Plan(SOURCES, 0)
    assert sorted(map(_key, done)) == [_key(plan.draw()) for _ in range(len(done))]


def test_what_was_given_back_comes_first_and_counts_its_attempts() -> None:
    progress = Progress(Plan(SOURCES, 0), GROUP_SIZE)
    draws = [progress.take() for _ in range(5)]
    progress.give_back(draws[3])
    progress.give_back(draws[1])
    again = [progress.take() for _ in range(3)]
    assert [(draw.position, draw.attempt) for draw in again] == [(1, 1), (3, 1), (5, 0)]


def test_a_snapshot_is_small_json_that_says_where_the_run_stands() -> None:
    progress = Progress(Plan(SOURCES, 0), GROUP_SIZE)
    first, second = progress.take(), progress.take()
    progress.finish(first)
    state = msgspec.json.decode(progress.snapshot(7, {"eval/a/mean": 0.5}, 6), type=Snapshot)
    assert (state.step, state.counts, state.baseline) == (7, [1, 1], {"eval/a/mean": 0.5})
    assert state.outstanding == [second] and state.evaluated == 6


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (Plan(SOURCES, 1).identity(GROUP_SIZE), "seed was 0, is 1"),
        (Plan(SOURCES, 0).identity(8), "rollout.group_size was 4, is 8"),
        (Plan(SOURCES[:1], 0).identity(GROUP_SIZE), "sources was"),
        (_identity("other:Class", {"sizes": (1, 2)}), "sources was .*'x:Class'.* is .*'other:Class'"),
        (_identity("x:Class", {"sizes": (1, 3)}), r"sources was .*\[1, 2\].* is .*\[1, 3\]"),
    ],
)
def test_a_snapshot_of_other_tasks_is_refused(changed: dict[str, object], named: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(Progress(Plan(SOURCES, 0), GROUP_SIZE).snapshot(1, {}))
    with pytest.raises(DataError, match=named) as error:
        load_snapshot(tmp_path, changed)
    assert "Set them as they were" in str(error.value)


def test_a_missing_or_foreign_snapshot_is_refused(tmp_path: Path) -> None:
    identity = Plan(SOURCES, 0).identity(GROUP_SIZE)
    with pytest.raises(CheckpointError, match="cannot read"):
        load_snapshot(tmp_path, identity)
    (tmp_path / "state.json").write_text('{"step": 1')
    with pytest.raises(CheckpointError, match=r"no state of an orchestrator.*resume\.step"):
        load_snapshot(tmp_path, identity)
    text = Progress(Plan(SOURCES, 0), GROUP_SIZE).snapshot(1, {})
    newer = text.replace(b'"format_version":1', b'"format_version":2')
    (tmp_path / "state.json").write_bytes(newer)
    with pytest.raises(CheckpointError, match="format version 2"):
        load_snapshot(tmp_path, identity)
