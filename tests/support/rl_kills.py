"""An RL run that is killed again and again, one part at a time, and what must be true of it in the end.

`KilledRun` starts the command `rl` in a folder, kills a part at a random moment, and goes on with `--resume`.
After every kill it checks how the command ended, that nothing outlived it, what is committed, and that the
next attempt goes on right after that, with the same weights in the policy server. `check` compares the run,
once it is complete, with the plan of its tasks, which is computed here from the rule alone.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from contract.attempt import Member, read_pid
from contract.commit import scan
from contract.layout import RunFolder
from telemetry.metrics import read_metrics
from tests.support.runs import Command, run_environment

Part = Literal["trainer", "orchestrator", "inference", "worker"]
Moment = Literal["start", "steps", "end"]

PARTS: tuple[Part, ...] = ("trainer", "orchestrator", "inference", "worker")
MOMENTS: tuple[Moment, ...] = ("start", "steps", "steps", "steps", "end")
"""As often as they are drawn; most of the time of a run is spent in its steps."""
_MEMBERS: dict[Part, Member] = {
    "trainer": 0,
    "orchestrator": "orchestrator",
    "inference": "inference",
    "worker": "orchestrator",
}
"""Whose process it is, or that of its parent."""
TITLES = {"inference": "policy server"}

KEEP_LAST = 2
GROUPS_PER_BATCH = 4
GROUP_SIZE = 3
MAX_AGE = 4
_ROOT = Path(__file__).parents[2]
_CONFIG = _ROOT / "configs" / "debug" / "rl.toml"
_WORKER = "orchestrator.environment.worker"
_SECONDS = 300.0
_POLL_SECONDS = 0.02
# About what a part needs from its begin to the first step, some steps, and the end.
_SPAN_SECONDS: dict[Moment, float] = {"start": 6.0, "steps": 1.5, "end": 1.0}
_SAME_WEIGHTS = 1e-6
"""Highest `mismatch_kl` between the trainer and a policy server with the same weights, in float32."""

# No group of the first source lacks a signal; of the second some do, and are dropped. Few tasks, so that a
# run takes all of them several times.
SOURCES: list[dict[str, Any]] = [
    {
        "name": "lottery",
        "environment": "tests.support.environments:Lottery",
        "weight": 2,
        "num_workers": 2,
        # So slow that many a worker is killed at a call.
        "settings": {"num_tasks": 7, "seconds": 0.1},
    },
    {
        "name": "letters",
        "environment": "sort-letters",
        "weight": 1,
        "settings": {"min_length": 3, "max_length": 3, "alphabet": "abcdefgh", "num_tasks": 5},
    },
]
_HELD_OUT = [{"environment": "sort-letters", "settings": {"split": "test", "num_tasks": 4}}]


@dataclass(frozen=True, slots=True)
class Kill:
    """What one kill met.

    Attributes:
        step: updates that were done.
        committed: the latest checkpoint when the run had ended.
        was_writing: whether it left a checkpoint that is cut off.
        code: exit code of the command.
    """

    part: Part
    moment: Moment
    step: int
    committed: int
    was_writing: bool
    code: int

    def __str__(self) -> str:
        cut = ", a checkpoint was cut off" if self.was_writing else ""
        return (
            f"{self.part:12} {self.moment:5} after step {self.step:3}: exit code {self.code:3}, "
            f"committed {self.committed:3}{cut}"
        )


def planned(sources: list[dict[str, Any]], seed: int, count: int) -> list[tuple[str, int]]:
    """Source and task of the first `count` positions: smooth weighted round robin over the sources, each in a
    permutation per pass over its tasks that is drawn from (seed, source, pass).
    """
    total = sum(source["weight"] for source in sources)
    credits, taken = [0] * len(sources), [0] * len(sources)
    found: list[tuple[str, int]] = []
    for _ in range(count):
        credits = [credit + source["weight"] for credit, source in zip(credits, sources, strict=True)]
        chosen = credits.index(max(credits))
        credits[chosen] -= total
        size = sources[chosen]["settings"]["num_tasks"]
        order = np.random.default_rng([seed, chosen, taken[chosen] // size]).permutation(size)
        found.append((sources[chosen]["name"], int(order[taken[chosen] % size])))
        taken[chosen] += 1
    return found


class KilledRun:
    """One run folder. A context manager: nothing of it is alive when it is left."""

    def __init__(self, root: Path, drawn: random.Random, num_steps: int, max_lead: int) -> None:
        """
        Args:
            root: an empty folder for everything.
            drawn: decides the moments.
        """
        self.folder = RunFolder(root / "run")
        self.is_complete = False
        self._root = root
        self._drawn = drawn
        self._num_steps = num_steps
        self._max_lead = max_lead
        self._environment = {
            **run_environment(root / "cache"),
            "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'src'}",
        }
        self._commands: list[Command] = []
        self._committed = 0
        # Step that each attempt went on from, by its number.
        self._begun: dict[int, int] = {}

    def __enter__(self) -> KilledRun:
        return self

    def __exit__(self, *error: object) -> None:
        for command in self._commands:
            command.kill_all()

    def kill(self, part: Part, moment: Moment, most: int = 1) -> list[Kill]:
        """Start the run or go on with it, and kill `part` at a random instant of `moment`; empty if the run
        was complete before.

        Args:
            most: of workers, which the run goes on without, so many are killed one after the other.
        """
        command, attempt = self._start(), max(self._begun)
        if not self._await_moment(command, part, moment):
            self._await_end(command, {0})
            return []
        steps: list[int] = []
        killed_at = 0.0
        while len(steps) < (most if part == "worker" else 1):
            self._sleep(command, self._drawn.uniform(0.0, _SPAN_SECONDS[moment]))
            step = self._steps_done()
            if not self._kill(part, attempt, killed_at):
                assert step == self._num_steps, f"no process of {part} after step {step}"
                break
            steps.append(step)
            killed_at = time.time()
        codes = {137}
        if part == "worker":
            # The first start of an environment is tried once: one that cannot start ends the run.
            codes = {0, 1} if moment == "start" else {0}
        code = self._await_end(command, codes if steps else {0})
        if code == 137:
            assert f"the {TITLES.get(part, part)} ended first, with exit code 137" in command.output
        if part == "worker" and moment == "steps":
            self._check_replaced(attempt, sum(step < self._num_steps - 1 for step in steps))
        assert self._committed >= max(steps, default=0) - 1
        was_writing = any(entry.state == "uncommitted" for entry in scan(self.folder.checkpoints))
        return [Kill(part, moment, step, self._committed, was_writing, code) for step in steps]

    def finish(self) -> None:
        """Go on with the run to its end, also if it was complete."""
        self._await_end(self._start(), {0})

    def check(self) -> int:
        """Compare the completed run with the plan; returns the number of episodes that were lost and
        counted.
        """
        entries = {entry.step: entry.state for entry in scan(self.folder.checkpoints)}
        steps = [*range(1, self._num_steps + 1)]
        # One more, where it was to be deleted when a kill came.
        assert {*steps[-KEEP_LAST:]} <= entries.keys() and len(entries) <= KEEP_LAST + 1, entries
        assert {*entries.values()} == {"committed"}, entries
        names = {path.name for path in self.folder.rollouts.iterdir()}
        expected = {f"step_{step}.jsonl" for step in steps}
        expected |= {f"eval_version_{version}.jsonl" for version in (0, self._num_steps)}
        assert names == expected, names ^ expected
        records = {record["step"]: record for record in read_metrics(self.folder.metrics)}
        assert [step for step, record in records.items() if "loss" in record] == steps
        self._check_tasks(records)
        self._check_versions()
        return int(sum(record.get("episodes/failed", 0) for record in records.values()))

    # -- one attempt

    def _start(self) -> Command:
        attempts = self._attempts()
        self._begun[attempts + 1] = self._committed
        flags = ["--resume"] if attempts else []
        options: dict[str, Any] = {
            "output-dir": self._root,
            "run-name": self.folder.root.name,
            "max-steps": self._num_steps,
            "model.name": _CONFIG.parent / "model",
            "sources": json.dumps(SOURCES),
            "evaluation.sources": json.dumps(_HELD_OUT),
            "evaluation.num-tasks": 4,
            "rollout.group-size": GROUP_SIZE,
            "rollout.groups-per-batch": GROUPS_PER_BATCH,
            "rollout.max-lead": self._max_lead,
            "rollout.max-off-policy-steps": MAX_AGE,
            "ckpt.interval": 1,
            "ckpt.keep-last": KEEP_LAST,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = Command(
            [sys.executable, "-m", "launcher.rl", "@", str(_CONFIG), "--no-export", *words, *flags],
            self._environment,
            self._root,
        )
        self._commands.append(command)
        return command

    def _await_moment(self, command: Command, part: Part, moment: Moment) -> bool:
        """Wait for the moment; False if the run has ended before."""
        attempt = max(self._begun)

        def is_there() -> bool:
            if moment == "start":
                return self._pids(part, attempt) != []
            first = self._first_step(attempt)
            return first is not None and (moment == "steps" or self._steps_done() >= self._num_steps)

        deadline = time.monotonic() + _SECONDS
        while not is_there():
            if command.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"{moment} of {part} did not come:\n{command.output}"
            time.sleep(_POLL_SECONDS)
        return True

    def _sleep(self, command: Command, seconds: float) -> None:
        """Not beyond the end of the command."""
        with suppress(subprocess.TimeoutExpired):
            command.process.wait(seconds)

    def _kill(self, part: Part, attempt: int, killed_at: float) -> bool:
        """Kill a process of this part; False if there is none.

        Args:
            killed_at: time of the last kill. Workers that were started after it come last: a worker whose
                start fails again and again is given up.
        """
        pids = self._pids(part, attempt)
        with suppress(psutil.Error):
            older = [pid for pid in pids if psutil.Process(pid).create_time() < killed_at]
            if pids:
                os.kill(self._drawn.choice(older or pids), signal.SIGKILL)
                return True
        return False

    def _pids(self, part: Part, attempt: int) -> list[int]:
        """Living processes of a part of this attempt."""
        pid = read_pid(self.folder.logs / f"attempt_{attempt}", _MEMBERS[part])
        if pid is None:
            return []
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found = [process]
            if part == "worker":
                found = [child for child in process.children() if _WORKER in child.cmdline()]
            return [one.pid for one in found if one.status() != psutil.STATUS_ZOMBIE]
        return []

    def _await_end(self, command: Command, codes: set[int]) -> int:
        """Wait for the end of the command; fails if a process outlives it. Then see where the run stands.

        Args:
            codes: exit codes that are right. 0 always is, if the run is complete: a kill may come when a part
                has done all it had to.
        """
        code = command.wait(_SECONDS).code
        states = {entry.step: entry.state for entry in scan(self.folder.checkpoints)}
        committed = [step for step, state in states.items() if state == "committed"]
        latest = max(committed, default=0)
        assert latest >= self._committed, (latest, self._committed)
        # A kill between a commit and the deletion that follows it leaves one more.
        assert min(KEEP_LAST, latest) <= len(committed) <= KEEP_LAST + 1, states
        first = self._first_step(max(self._begun))
        assert first in (None, self._committed + 1), (first, self._committed)
        self._committed = latest
        self.is_complete = code == 0 and latest == self._num_steps
        assert code in codes - {0} or self.is_complete, f"exit code {code}, step {latest}:\n{command.output}"
        return code

    def _check_replaced(self, attempt: int, count: int) -> None:
        """The orchestrator has told of `count` workers, or more."""
        log = (self.folder.logs / f"attempt_{attempt}" / "orchestrator.log").read_text()
        assert (
            len(re.findall("A worker of source|the worker is replaced|could not be replaced", log)) >= count
        ), log

    # -- what is there

    def _attempts(self) -> int:
        return len([*self.folder.logs.glob("attempt_*")])

    def _steps_done(self) -> int:
        return max((record["step"] for record in self._trained()), default=0)

    def _first_step(self, attempt: int) -> int | None:
        """The first step that an attempt trained."""
        return next((record["step"] for record in self._trained() if record["attempt"] == attempt), None)

    def _trained(self) -> list[dict[str, Any]]:
        """Records of updates, of all attempts, in their order; a line that a kill tore is left out."""
        found, path = [], self.folder.metrics
        for line in path.read_text().splitlines() if path.exists() else []:
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return [record for record in found if "loss" in record]

    # -- the end

    def _check_tasks(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        """What was trained, dropped, or is left is the beginning of the plan, each position once."""
        trained: dict[int, tuple[str, int]] = {}
        num_missing = num_failed = 0
        for step in range(1, self._num_steps + 1):
            groups = {(row["position"], row["source"], row["task"]) for row in self._trace(step)}
            for position, source, task in groups:
                assert position not in trained, f"position {position} is trained in {step} and before"
                trained[position] = (source, task)
            assert len(groups) == GROUPS_PER_BATCH == records[step]["groups/trained"], step
            # An episode that a dead worker has lost is missing, and counted.
            num_missing += GROUPS_PER_BATCH * GROUP_SIZE - len(self._trace(step))
            num_failed += records[step]["episodes/failed"]
            assert num_missing <= num_failed, step
        state = json.loads(
            (self.folder.checkpoints / f"step_{self._num_steps}" / "orchestrator" / "state.json").read_text()
        )
        left = {
            draw["position"]: (SOURCES[draw["source"]]["name"], draw["task"]) for draw in state["outstanding"]
        }
        assert not left.keys() & trained.keys()
        num_dropped = sum(
            record["groups/dropped_no_signal"] + record["groups/dropped_failed"]
            for record in records.values()
            if "loss" in record
        )
        plan = planned(SOURCES, 0, sum(state["counts"]))
        for position, task in {**trained, **left}.items():
            assert plan[position] == task, position
        assert len(trained) + num_dropped + len(left) == len(plan)
        # The rest are the dropped ones, by their number; what was trained is the plan without them.
        rest = [task for position, task in enumerate(plan) if position not in trained.keys() | left.keys()]
        assert len(rest) == num_dropped
        assert Counter(trained.values()) + Counter(left.values()) + Counter(rest) == Counter(plan)

    def _check_versions(self) -> None:
        """The policy server had the right weights, above all after a resume."""
        trained = {record["step"]: record for record in self._trained()}  # the last of each step
        for step, record in trained.items():
            rows = self._trace(step)
            versions = {version for row in rows for version in row["versions"]}
            oldest = max(self._begun[record["attempt"]], step - 1 - self._max_lead * MAX_AGE)
            assert oldest <= min(versions) <= max(versions) <= step - 1, (step, oldest, versions)
            if versions == {step - 1}:
                assert record["mismatch_kl"] < _SAME_WEIGHTS, record

    def _trace(self, step: int) -> list[dict[str, Any]]:
        lines = (self.folder.rollouts / f"step_{step}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
