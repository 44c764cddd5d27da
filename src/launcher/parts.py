"""The entry points of the commands `trainer`, `orchestrator` and `inference`; `parts_run` is what they do.

`python -m launcher.parts ranks CONFIG ATTEMPT_DIR` runs the ranks of the trainer for `rl`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from contract.entry import entry_point


@entry_point(before="training began")
def trainer() -> Callable[..., int]:
    """Entry point of `trainer`; returns the exit code. Takes the words of the command line, if not those of
    `argv`.
    """
    from launcher.parts_run import run_trainer

    return run_trainer


@entry_point(before="sampling began")
def orchestrator() -> Callable[..., int]:
    """Entry point of `orchestrator`, like that of `trainer`."""
    from launcher.parts_run import run_orchestrator

    return run_orchestrator


@entry_point(before="the policy server began")
def inference() -> Callable[..., int]:
    """Entry point of `inference`, like that of `trainer`."""
    from launcher.parts_run import run_inference

    return run_inference


@entry_point(before="training began")
def ranks() -> Callable[[Path, Path], int]:
    """The ranks of the trainer, under `rl`; returns the exit code."""
    from launcher.parts_run import run_ranks

    return run_ranks


if __name__ == "__main__":
    if sys.argv[1] != "ranks":
        sys.exit(f"launcher.parts: {sys.argv[1]!r} is not `ranks`")
    sys.exit(ranks(Path(sys.argv[2]), Path(sys.argv[3])))
