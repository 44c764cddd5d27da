"""`python -m inference CONFIG ATTEMPT_DIR`: the policy server of a run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from contract.control import holding_pause_signal
from contract.errors import EXIT_SIGNAL_BASE


@holding_pause_signal()
def main() -> int:
    """Serve; returns the exit code."""
    try:
        from inference.cli import run_part  # a second, in which a signal may come

        return run_part(Path(sys.argv[1]), Path(sys.argv[2]))
    except KeyboardInterrupt:  # `run` handles signals itself, once it has begun
        print("ended by SIGINT before the policy server began", file=sys.stderr)
        return EXIT_SIGNAL_BASE + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
