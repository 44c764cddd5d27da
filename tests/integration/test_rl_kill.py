"""An RL run whose parts are killed one after the other; `scripts/kill_rl.py` does the same many times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.rl_kills import KilledRun, Part, planned


@pytest.mark.timeout(1200)
def test_a_run_survives_the_kill_of_each_part_and_trains_the_tasks_of_its_plan_once(tmp_path: Path) -> None:
    with KilledRun(tmp_path, random.Random(0), num_steps=16, max_lead=1) as run:
        parts: list[Part] = ["inference", "orchestrator", "trainer"]
        for part in parts:
            (kill,) = run.kill(part, "steps")
            assert kill.code == 137
        kills = run.kill("worker", "steps")
        assert kills and run.is_complete, "the run did not go on without its worker"
        run.check()


def test_the_plan_of_the_kills_is_the_documented_one() -> None:
    sources = [
        {"name": "a", "weight": 3, "settings": {"num_tasks": 2}},
        {"name": "b", "weight": 1, "settings": {"num_tasks": 1}},
    ]
    plan = planned(sources, 0, 8)
    assert [name for name, _ in plan] == ["a", "a", "b", "a", "a", "a", "b", "a"]
    tasks = [task for name, task in plan if name == "a"]
    assert [{*tasks[i : i + 2]} for i in (0, 2, 4)] == [{0, 1}] * 3
