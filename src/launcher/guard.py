"""The guard of one rank: starts the rank's program, collects its output, and records how it ended.

The agent (torchrun's) starts one guard per rank as its worker. A guard adds what the agent lacks:

- the rank's process id and, whatever kills the rank, its exit code and time are on disk;
- a rank that ended because it was asked to (a signal, a pause) is not reported to the agent before all ranks
  have ended. The agent would take the first exit for a failure and interrupt the others while they save;
- when the agent ends a rank (another one failed, or the agent itself was told to end) the rank gets one
  SIGTERM, and SIGKILL a bounded time later;
- the rank ends with its guard, and the guard with its agent, also after `kill -9`.

Runs as `python -m launcher.guard launch.json` with the environment of a torchrun worker. Imports the standard
library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from contract.attempt import ExitRecord, die_with_parent, log_path, read_exit, register_rank, write_exit
from contract.errors import EXIT_OK, EXIT_PAUSED, EXIT_SIGNAL_BASE, is_asked_for
from launcher.alive import describe_end
from launcher.spec import AGENT_VARIABLE, LaunchSpec, read_spec

_POLL_SECONDS = 0.05


class Guard:
    """Watches over one rank."""

    def __init__(self, spec: LaunchSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._ended_by_agent = False
        self._failed_before = False
        self._kill_at: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run the rank to its end; returns its exit code (128 + n after signal n)."""
        signal.signal(signal.SIGTERM, self._on_agent_signal)
        signal.signal(signal.SIGINT, self._on_agent_signal)
        with open(log_path(self._spec.attempt_dir, self._rank), "ab") as log:
            self._process = self._start(log.fileno())
        register_rank(self._spec.attempt_dir, self._rank, self._process.pid)
        if self._ended_by_agent:  # the signal came before there was a process to pass it to
            self._process.terminate()
        code = self._wait(self._process)
        record = self._record(code)
        if is_asked_for(record.code):
            self._wait_for_peers()
        return record.code

    def _start(self, output: int) -> subprocess.Popen[bytes]:
        guard_pid = os.getpid()
        return subprocess.Popen(
            self._spec.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # In a session of its own the rank gets each signal once: from its guard or from the launcher.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(guard_pid),
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        while True:
            try:
                return process.wait(_POLL_SECONDS if self._kill_at is not None else 1.0)
            except subprocess.TimeoutExpired:
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    process.kill()

    def _record(self, code: int) -> ExitRecord:
        """Complete the rank's own record, or write the one that it could not."""
        signum = -code if code < 0 else None
        own = read_exit(self._spec.attempt_dir, self._rank)
        if own is not None and (own.code != 0 or code == 0):
            message, at, code = own.message, own.time_ns, own.code
            signum = None
        else:
            at = time.time_ns()
            code = EXIT_SIGNAL_BASE + signum if signum is not None else code
            message = "" if code == 0 else describe_end(code, signum)
        # The agent sees who has ended first; who failed first may still have been about to end.
        ended_by_agent = self._ended_by_agent and not self._failed_before
        record = ExitRecord(self._rank, code, message, at, signum, ended_by_agent, final=True)
        write_exit(self._spec.attempt_dir, record)
        return record

    def _wait_for_peers(self) -> None:
        """Hold the rank's end back until all ranks have ended, the agent ends this one, or time is up."""
        deadline = time.monotonic() + self._spec.grace_seconds
        while time.monotonic() < deadline and not self._ended_by_agent:
            records = [read_exit(self._spec.attempt_dir, rank) for rank in range(self._spec.num_processes)]
            if all(record is not None and record.final for record in records):
                return
            time.sleep(_POLL_SECONDS)

    def _on_agent_signal(self, signum: int, frame: FrameType | None) -> None:
        """The agent ends this rank: because another one failed, or because the agent itself has to end."""
        if self._ended_by_agent:
            return
        records = [read_exit(self._spec.attempt_dir, rank) for rank in range(self._spec.num_processes)]
        failed = [
            record.rank
            for record in records
            if record is not None and record.code not in (EXIT_OK, EXIT_PAUSED)
        ]
        self._failed_before = self._rank in failed
        # After a failure nothing can be saved any more; without one the run may still be saved.
        self._kill_at = time.monotonic() + (self._spec.stop_seconds if failed else self._spec.grace_seconds)
        self._ended_by_agent = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


def main() -> int:
    """Entry point."""
    agent_pid = os.environ.get(AGENT_VARIABLE)
    die_with_parent(None if agent_pid is None else int(agent_pid))
    return Guard(read_spec(Path(sys.argv[1])), int(os.environ["RANK"])).run()


if __name__ == "__main__":
    sys.exit(main())
