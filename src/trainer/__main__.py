"""`python -m trainer CONFIG ATTEMPT_DIR`: one rank."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from contract.control import holding_pause_signal
from contract.errors import EXIT_SIGNAL_BASE


@holding_pause_signal()
def main() -> int:
    """Train as this rank; returns the exit code."""
    try:
        from trainer.cli import run  # seconds, in which a signal may come

        return run(Path(sys.argv[1]), Path(sys.argv[2]))
    except KeyboardInterrupt:  # `run` handles signals itself, once it has begun
        print("ended by SIGINT before training began", file=sys.stderr)
        return EXIT_SIGNAL_BASE + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
