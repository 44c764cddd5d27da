"""What the launcher, its agent and the ranks' guards tell each other: one file in the attempt's folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

ATTEMPT_VARIABLE = "TAILRACE_ATTEMPT"
"""Environment variable that marks every process of an attempt, so that none can be left behind unseen."""

AGENT_VARIABLE = "TAILRACE_AGENT_PID"
"""Environment variable with the agent's process id, by which a guard sees whether its parent has gone."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A launch of several ranks on this machine.

    Attributes:
        command: the program of every rank; rank and world size are in its environment, as with torchrun.
        num_processes: ranks.
        attempt_dir: folder for logs, process ids and exit records.
        num_threads: CPU threads per rank.
        grace_seconds: after a signal, the time that ranks get to save.
        stop_seconds: after the failure of a rank, the time that the others get to end.
    """

    command: list[str]
    num_processes: int
    attempt_dir: Path
    num_threads: int
    grace_seconds: float
    stop_seconds: float = 10.0

    @property
    def path(self) -> Path:
        """Where the specification lies."""
        return self.attempt_dir / "launch.json"

    def write(self) -> None:
        """Write it into the attempt's folder."""
        self.path.write_text(json.dumps({**asdict(self), "attempt_dir": str(self.attempt_dir)}, indent=2))


def read_spec(path: Path) -> LaunchSpec:
    """The specification at `path`."""
    fields = json.loads(path.read_text())
    return LaunchSpec(**{**fields, "attempt_dir": Path(fields["attempt_dir"])})


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
