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
import signal
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

from contract.attempt import read_pid
from contract.commit import scan
from contract.layout import RunFolder
from telemetry.metrics import read_metrics
from tests.support.runs import POLL_SECONDS, Command, run_environment, wait_until

Part = Literal["trainer", "orchestrator", "inference", "worker"]
Moment = Literal["start", "steps", "end"]

PARTS: tuple[Part, ...] = ("trainer", "orchestrator", "inference", "worker")
MOMENTS: tuple[Moment, ...] = ("start", "steps", "steps", "steps", "end")
"""As often as they are drawn; most of the time of a run is spent in its steps."""
TITLES = {"inference": "policy server"}

KEEP_LAST = 2
GROUPS_PER_BATCH = 4
GROUP_SIZE = 3
_ROOT = Path(__file__).parents[2]
_CONFIG = _ROOT / "configs" / "debug" / "rl.toml"
_SECONDS = 300.0
_START_SECONDS = 6.0
"""About what a part needs from its begin to its first step."""
_STEPS_SECONDS = 1.5
_END_SECONDS = 1.0
_SAME_WEIGHTS = 1e-6
"""Highest `mismatch_kl` between the trainer and a policy server with the same weights, in float32."""

# No group of the first source lacks a signal; of the second some do, and are dropped. Few tasks, so that a run
# takes all of them several times.
SOURCES: list[dict[str, Any]] = [
    {
        "name": "lottery",
        "environment": "tests.support.environments:Lottery",
        "weight": 2,
        "num_workers": 2,
        "settings": {"num_tasks": 7},
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
        code: exit code of the command; None of one that went on.
    """

    part: Part
    moment: Moment
    step: int
    committed: int
    was_writing: bool
    code: int | None

    def __str__(self) -> str:
        cut = ", a checkpoint cut off" if self.was_writing else ""
        code = "went on" if self.code is None else f"exit code {self.code}"
        return f"{self.part:12} {self.moment:5} step {self.step:3}, {code}, goes on from {self.committed}{cut}"


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
        self._environment = {**run_environment(root / "cache"), "PYTHONPATH": str(_ROOT)}
        self._commands: list[Command] = []
        self._committed = 0
        # Step that each attempt went on from, by its number.
        self._begun: dict[int, int] = {}

    def __enter__(self) -> KilledRun:
        return self

    def __exit__(self, *error: object) -> None:
        for command in self._commands:
            command.kill_all()

    def kill(self, part: Part, moment: Moment) -> Kill | None:
        """Start the run or go on with it, and kill `part` at a random instant of `moment`; None if the run was
        complete before.
        """
        command = self._start()
        self._await_moment(command, part, moment)
        step = self._steps_done()
        is_hit = self._kill(part)
        if part == "worker" and is_hit and moment != "start":
            return self._go_on_without(command, moment, step)
        code = self._await_end(command)
        if not is_hit:
            assert code == 0 and self.is_complete, command.output
            return None
        if part == "worker":
            # The first start of an environment is tried once: one that cannot start ends the run.
            assert code in (0, 1), command.output
        elif not (code == 0 and self.is_complete):
            assert code == 137, command.output
            assert f"the {TITLES.get(part, part)} ended first, with exit code 137" in command.output
        assert self._committed >= step - 1, (self._committed, step)
        was_writing = any(entry.state == "uncommitted" for entry in scan(self.folder.checkpoints))
        return Kill(part, moment, step, self._committed, was_writing, code)

    def finish(self) -> None:
        """Go on with the run to its end, also if it was complete."""
        command = self._start()
        code = self._await_end(command)
        assert code == 0 and self.is_complete, command.output

    def check(self) -> None:
        """Compare the completed run with the plan."""
        entries = {entry.step: entry.state for entry in scan(self.folder.checkpoints)}
        steps = [*range(1, self._num_steps + 1)]
        # A kill between a commit and the deletion that follows it leaves one more.
        assert {*steps[-KEEP_LAST:]} <= entries.keys() and len(entries) <= KEEP_LAST + 1, entries
        assert {*entries.values()} == {"committed"}, entries
        names = {path.name for path in self.folder.rollouts.iterdir()}
        expected = {f"step_{step}.jsonl" for step in steps}
        expected |= {f"eval_version_{version}.jsonl" for version in (0, self._num_steps)}
        assert names == expected, names ^ expected
        records = {record["step"]: record for record in read_metrics(self.folder.metrics)}
        assert [step for step, record in records.items() if "loss" in record] == steps
        assert "eval/letters/mean" not in records  # the held-out source has its own name
        self._check_tasks(records)
        self._check_versions(records)

    # -- one attempt

    def _start(self) -> Command:
        attempts = self._attempts()
        self._begun[attempts + 1] = self._committed
        flags = ["--resume"] if attempts else []
        rollout = {
            "group_size": GROUP_SIZE,
            "groups_per_batch": GROUPS_PER_BATCH,
            "max_lead": self._max_lead,
        }
        options: dict[str, Any] = {
            "output-dir": self._root,
            "run-name": self.folder.root.name,
            "max-steps": self._num_steps,
            "model.name": _CONFIG.parent / "model",
            "sources": json.dumps(SOURCES),
            "evaluation.sources": json.dumps(_HELD_OUT),
            "evaluation.num-tasks": 4,
            "rollout.max-off-policy-steps": 4,
            "ckpt.interval": 1,
            "ckpt.keep-last": KEEP_LAST,
            **{f"rollout.{name.replace('_', '-')}": value for name, value in rollout.items()},
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = Command(
            [sys.executable, "-m", "launcher.rl", "@", str(_CONFIG), "--no-export", *words, *flags],
            self._environment,
            self._root,
        )
        self._commands.append(command)
        return command

    def _await_moment(self, command: Command, part: Part, moment: Moment) -> None:
        """Wait until the random instant, or the end of the run."""
        attempt = max(self._begun)

        def is_ready() -> bool:
            if command.process.poll() is not None:
                return True
            if moment == "start":
                return self._pids(part, attempt) != []
            first = self._first_step(attempt)
            return first is not None and (moment == "steps" or self._steps_done() >= self._num_steps)

        wait_until(is_ready, f"{moment} of {part}; it printed: {command.output}", seconds=_SECONDS)
        longest = {"start": _START_SECONDS, "steps": _STEPS_SECONDS, "end": _END_SECONDS}[moment]
        deadline = time.monotonic() + self._drawn.uniform(0.0, longest)
        while time.monotonic() < deadline and command.process.poll() is None:
            time.sleep(POLL_SECONDS)

    def _kill(self, part: Part) -> bool:
        """Whether there was a process to kill."""
        pids = self._pids(part, max(self._begun))
        if not pids:
            return False
        with suppress(ProcessLookupError):
            os.kill(self._drawn.choice(pids), signal.SIGKILL)
            return True
        return False

    def _pids(self, part: Part, attempt: int) -> list[int]:
        """Living processes of a part of this attempt."""
        pid = read_pid(
            self.folder.logs / f"attempt_{attempt}", "orchestrator" if part == "worker" else part
        )
        with suppress(psutil.Error):
            process = None if pid is None else psutil.Process(pid)
            if process is None or process.status() == psutil.STATUS_ZOMBIE:
                return []
            if part != "worker":
                return [process.pid]
            return [
                child.pid
                for child in process.children()
                if "orchestrator.environment.worker" in child.cmdline()
            ]
        return []

    def _await_end(self, command: Command) -> int:
        """Wait for the end of the command; fails if a process outlives it. Then see where the run stands."""
        code = command.wait(_SECONDS).code
        states = {entry.step: entry.state for entry in scan(self.folder.checkpoints)}
        committed = [step for step, state in states.items() if state == "committed"]
        latest = max(committed, default=0)
        assert latest >= self._committed, (latest, self._committed)
        assert min(KEEP_LAST, latest) <= len(committed) <= KEEP_LAST + 1, states
        first = self._first_step(max(self._begun))
        assert first in (None, self._committed + 1), (first, self._committed)
        self._committed = latest
        self.is_complete = code == 0 and latest == self._num_steps
        return code

    def _go_on_without(self, command: Command, moment: Moment, step: int) -> Kill:
        """A worker was killed: the run goes on by itself, and says so."""
        code = self._await_end(command)
        assert code == 0 and self.is_complete, command.output
        return Kill("worker", moment, step, self._committed, False, None)

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
                record = json.loads(line)
                if "loss" in record:
                    found.append(record)
        return found

    # -- the end

    def _check_tasks(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        """What was trained, dropped, or is left is the beginning of the plan, each position once."""
        trained: dict[int, tuple[str, int]] = {}
        for step in range(1, self._num_steps + 1):
            groups = {(row["position"], row["source"], row["task"]) for row in self._trace(step)}
            for position, source, task in groups:
                assert position not in trained, f"position {position} is trained in {step} and before"
                trained[position] = (source, task)
            assert len(groups) == GROUPS_PER_BATCH == records[step]["groups/trained"], step
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

    def _check_versions(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        """The policy server had the right weights, above all after a resume."""
        resumed = {self._first_step(attempt): step for attempt, step in self._begun.items()}
        for step in range(1, self._num_steps + 1):
            rows = self._trace(step)
            versions = {version for row in rows for version in row["versions"]}
            begun = resumed.get(step)
            oldest = step - 1 - self._max_lead if begun is None else begun
            # Groups in flight over an update may hold tokens of the version before.
            assert max(0, oldest - 1 * (begun is None and self._max_lead > 0)) <= min(versions), (step, rows)
            assert max(versions) <= step - 1, (step, rows)
            if versions == {step - 1}:
                assert records[step]["mismatch_kl"] < _SAME_WEIGHTS, records[step]

    def _trace(self, step: int) -> list[dict[str, Any]]:
        lines = (self.folder.rollouts / f"step_{step}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
