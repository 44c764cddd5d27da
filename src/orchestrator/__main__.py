"""`python -m orchestrator CONFIG ATTEMPT_DIR`: the orchestrator's process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from contract.entry import entry_point


@entry_point(before="sampling began")
def main() -> Callable[[Path, Path], int]:
    """Sample for the run; returns the exit code."""
    from orchestrator.cli import run

    return run


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
