"""`python -m trainer CONFIG ATTEMPT_DIR`: one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from contract.entry import entry_point


@entry_point(before="training began")
def main() -> Callable[[Path, Path], int]:
    """Train as this rank; returns the exit code."""
    from trainer.cli import run

    return run


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
