"""`python -m orchestrator CONFIG ATTEMPT_DIR`: the orchestrator's process."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from contract.errors import EXIT_SIGNAL_BASE


def main() -> int:
    """Sample for the run; returns the exit code."""
    try:
        from orchestrator.cli import run  # a second or so, in which a signal may come

        return run(Path(sys.argv[1]), Path(sys.argv[2]))
    except KeyboardInterrupt:  # `run` handles signals itself, once it has begun
        print("ended by SIGINT before sampling began", file=sys.stderr)
        return EXIT_SIGNAL_BASE + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
