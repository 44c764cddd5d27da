"""`python -m inference CONFIG ATTEMPT_DIR`: the policy server of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from contract.entry import entry_point


@entry_point(before="the policy server began")
def main() -> Callable[[Path, Path], int]:
    """Serve; returns the exit code."""
    from inference.cli import run_part

    return run_part


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
