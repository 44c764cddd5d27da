"""The sweeper: sees that no process of an RL run outlives its launcher, however that ends.

Waits until its standard input ends, of which the launcher alone holds the other side. Parts are told to end
by the kernel when the launcher dies; whatever is alive a bounded time later is killed here, and given up a
bounded time after that: it hangs in the kernel. Runs as
`python -m launcher.sweeper ATTEMPT_DIR SECONDS`. Imports the standard library.
"""

from __future__ import annotations

import signal
import sys
import time

from contract.errors import EXIT_FAILURE, EXIT_OK
from launcher.alive import marked_processes, send
from launcher.running import PARTS_VARIABLE

_POLL_SECONDS = 0.1
_KILL_SECONDS = 60.0


def main() -> int:
    """Entry point."""
    attempt, seconds = sys.argv[1], float(sys.argv[2])
    # The launcher decides when the run ends.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + seconds
    while alive := marked_processes(PARTS_VARIABLE, attempt):
        if time.monotonic() >= deadline + _KILL_SECONDS:
            return EXIT_FAILURE
        if time.monotonic() >= deadline:
            for pid in alive:
                send(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
