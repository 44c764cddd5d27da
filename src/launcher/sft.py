"""The entry point of the command `sft`; `sft_run` is what it does.

Imports next to nothing before it is in charge of signals: reading the libraries of a command takes a while on
a busy machine, and Ctrl-C must not show where it struck.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from contract.control import holding_pause_signal
from contract.errors import EXIT_SIGNAL_BASE


# SIGUSR1 would end this process before the trainer, or the launcher of several processes, can answer it.
@holding_pause_signal()
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. `argv` None takes the words of the command line."""
    try:
        from launcher.sft_run import run  # takes much longer than all above

        return run(argv)
    except KeyboardInterrupt:
        # The processes of the run, and the launcher of several, take signals over when they begin.
        print("ended by SIGINT before training began", file=sys.stderr)
        return EXIT_SIGNAL_BASE + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
