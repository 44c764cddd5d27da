"""Start the ranks of a run, watch them, and end them: signals, the console, the exit code.

    launcher (this module) - agent (torchrun) - guard of rank r - rank r

Invariants: when `launch` returns, no process of the attempt is alive; the exit code is that of the rank that
failed first; signals go from here to the ranks themselves, since the agent would end them at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from contract.attempt import ExitRecord, die_with_parent, log_path, read_exit, read_pid
from contract.control import PAUSE_SIGNAL, hold_pause_signal, letting_pause_signal_through
from contract.errors import EXIT_FAILURE, EXIT_OK, EXIT_PAUSED, EXIT_SIGNAL_BASE, is_asked_for
from launcher.alive import end_within, marked_processes, send
from launcher.output import Tail, console_width, last_lines
from launcher.spec import ATTEMPT_VARIABLE, LaunchSpec

_POLL_SECONDS = 0.1
_LEFTOVER_SECONDS = 2.0
_KILL_SECONDS = 10.0
_SIGNALS_UNTIL_KILL = 3


def launch(spec: LaunchSpec, *, keep_open: tuple[int, ...] = ()) -> int:
    """Run `spec.command` in `spec.num_processes` ranks until all have ended; returns the exit code of the
    run.

    The first and the second SIGINT or SIGTERM are passed on to the ranks (save and end; end at once), the
    third kills them, as does the end of `spec.grace_seconds` after the first. SIGUSR1 is passed on as well
    (pause), and has no limit. Rank 0's output is shown on this process's stdout.

    Args:
        keep_open: file descriptors that the agent inherits; it outlives this process until all ranks have
            ended.
    """
    spec.write()
    return _Launch(spec, keep_open).run()


class _Launch:
    """One launch, from the first process to the last."""

    def __init__(self, spec: LaunchSpec, keep_open: tuple[int, ...]) -> None:
        self._spec = spec
        self._keep_open = keep_open
        self._console = Tail(log_path(spec.attempt_dir, 0))
        self._signals: list[int] = []
        self._delivered = [0] * spec.num_processes
        self._num_pauses = 0
        self._pauses_delivered = [0] * spec.num_processes
        self._kill_at: float | None = None
        self._agent_told = False
        self._killed = False

    def run(self) -> int:
        with self._handling_signals(), open(self._agent_log, "wb") as log:
            agent = self._start_agent(log.fileno())
            try:
                code = self._watch(agent)
            finally:
                # Also after an error of the launcher itself nothing may stay behind.
                self._end_leftovers(agent)
        self._show_output()
        return self._outcome(code)

    @property
    def _agent_log(self) -> Path:
        return self._spec.attempt_dir / "agent.log"

    def _show_output(self) -> None:
        """Copy rank 0's output to the console, until another rank fails: what rank 0 says then is a
        consequence that would be taken for the cause. It is in its log.
        """
        others = (read_exit(self._spec.attempt_dir, rank) for rank in range(1, self._spec.num_processes))
        if not any(record is not None and _is_failure(record) for record in others):
            for chunk in self._console.read():
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()

    def _start_agent(self, log: int) -> subprocess.Popen[bytes]:
        launcher_pid = os.getpid()
        environment = {
            **os.environ,
            ATTEMPT_VARIABLE: str(self._spec.attempt_dir),
            "OMP_NUM_THREADS": str(self._spec.num_threads),
            "PYTHONUNBUFFERED": "1",
            # Output goes through a file to this console: programs should still fill its width.
            "COLUMNS": str(console_width()),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "launcher.agent", str(self._spec.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            # Ctrl-C in a terminal reaches this process only, which passes it on once.
            start_new_session=True,
            pass_fds=self._keep_open,
            preexec_fn=lambda: _prepare_agent(launcher_pid),
        )

    def _watch(self, agent: subprocess.Popen[bytes]) -> int:
        """Show output and pass signals on until the agent has ended; returns its exit code."""
        while True:
            code = agent.poll()
            self._show_output()
            if code is not None:
                return code
            self._pass_pauses()
            self._pass_signals(agent)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                asked = len(self._signals) >= _SIGNALS_UNTIL_KILL
                reason = (
                    "third signal"
                    if asked
                    else f"the ranks did not end within {self._spec.grace_seconds:g} s"
                )
                _say(f"{reason}: killing them; the last committed checkpoint stands")
                self._killed = True
                return EXIT_SIGNAL_BASE + signal.SIGKILL
            time.sleep(_POLL_SECONDS)

    def _pass_pauses(self) -> None:
        """Send every rank each SIGUSR1 once; one that starts later gets it then, and holds it back until it
        can answer.
        """
        for rank, delivered in enumerate(self._pauses_delivered):
            if delivered == self._num_pauses:
                continue
            pid = read_pid(self._spec.attempt_dir, rank)
            if pid is None:
                continue
            if read_exit(self._spec.attempt_dir, rank) is None:
                send(pid, PAUSE_SIGNAL)
            self._pauses_delivered[rank] += 1

    def _pass_signals(self, agent: subprocess.Popen[bytes]) -> None:
        """Send every rank the signals that it has not had; one that starts later gets them then."""
        if not self._signals:
            return
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._spec.grace_seconds
        if len(self._signals) >= _SIGNALS_UNTIL_KILL:
            self._kill_at = time.monotonic()
            return
        pids = [read_pid(self._spec.attempt_dir, rank) for rank in range(self._spec.num_processes)]
        if all(pid is None for pid in pids):
            # No rank has begun: there is nothing to save, and the agent ends whatever it has started.
            if not self._agent_told:
                self._agent_told = True
                agent.terminate()
            return
        for rank, pid in enumerate(pids):
            if pid is None or self._delivered[rank] == len(self._signals):
                continue
            if read_exit(self._spec.attempt_dir, rank) is None:
                # One signal per round: two equal ones that are pending together count as one.
                send(pid, self._signals[self._delivered[rank]])
            self._delivered[rank] += 1

    def _end_leftovers(self, agent: subprocess.Popen[bytes]) -> None:
        """See that no process of the attempt is alive; ranks whose agent was killed still get to save."""
        deadline = time.monotonic() + _LEFTOVER_SECONDS
        if agent.poll() is None:
            deadline = time.monotonic()
        elif self._lost_agent(agent) and self._alive():
            deadline = time.monotonic() + self._spec.grace_seconds
        while alive := self._alive():
            self._show_output()
            if time.monotonic() >= deadline + _KILL_SECONDS:
                pids = ", ".join(map(str, alive))
                _say(f"these processes were killed and have not ended: {pids}; they hang in the kernel")
                break
            if time.monotonic() >= deadline or len(self._signals) >= _SIGNALS_UNTIL_KILL:
                for pid in alive:
                    send(pid, signal.SIGKILL)
                if agent.poll() is None:
                    agent.kill()
            time.sleep(_POLL_SECONDS / 2)
            agent.poll()
        end_within(agent, _KILL_SECONDS)

    def _lost_agent(self, agent: subprocess.Popen[bytes]) -> bool:
        return agent.returncode is not None and agent.returncode < 0

    def _alive(self) -> list[int]:
        marked = marked_processes(ATTEMPT_VARIABLE, str(self._spec.attempt_dir))
        if marked is not None:
            return marked
        pids = [read_pid(self._spec.attempt_dir, rank) for rank in range(self._spec.num_processes)]
        return [pid for pid in pids if pid is not None and send(pid, 0)]

    def _outcome(self, agent_code: int) -> int:
        """The exit code of the run; prints what failed first."""
        records = [read_exit(self._spec.attempt_dir, rank) for rank in range(self._spec.num_processes)]
        first = first_failure([record for record in records if record is not None])
        interrupted = first is not None and first.code - EXIT_SIGNAL_BASE in self._signals
        if self._killed and (first is None or interrupted):
            return EXIT_SIGNAL_BASE + signal.SIGKILL  # not the code of a run whose state was saved
        if first is not None and not first.ended_by_launcher:
            name = signal.Signals(first.code - EXIT_SIGNAL_BASE).name if interrupted else ""
            _say(f"the run was ended by {name}" if interrupted else _report(first, self._spec.attempt_dir))
            return first.code
        if any(record is not None and record.code == EXIT_PAUSED for record in records):
            _say("the run is paused; go on with --resume")
            return EXIT_PAUSED
        if agent_code == EXIT_OK:
            return EXIT_OK
        if self._signals:
            _say(f"ended by {signal.Signals(self._signals[0]).name} before training began")
            return EXIT_SIGNAL_BASE + self._signals[0]
        code = EXIT_SIGNAL_BASE - agent_code if agent_code < 0 else EXIT_FAILURE
        _say(
            f"the process that starts the ranks failed (exit code {code}); the end of {self._agent_log}:\n"
            f"{last_lines(self._agent_log)}"
        )
        return code

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        def remember(signum: int, frame: FrameType | None) -> None:
            # A closed terminal is passed on as SIGTERM, which ranks know.
            self._signals.append(signal.SIGTERM if signum == signal.SIGHUP else signum)

        def remember_pause(signum: int, frame: FrameType | None) -> None:
            self._num_pauses += 1

        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            handled.append(signal.SIGHUP)
        earlier = {signum: signal.signal(signum, remember) for signum in handled}
        earlier[PAUSE_SIGNAL] = signal.signal(PAUSE_SIGNAL, remember_pause)
        try:
            with letting_pause_signal_through():
                yield
        finally:
            for signum, handler in earlier.items():
                signal.signal(signum, handler)


def first_failure(records: list[ExitRecord]) -> ExitRecord | None:
    """The record that caused the others; None if all ranks succeeded or paused.

    A rank that a signal killed could not speak first, so it comes before ranks that lost their peer and said
    so. Ranks that were told to end because of another one are no cause.
    """
    failed = [record for record in records if record.code not in (EXIT_OK, EXIT_PAUSED)]
    causes = [record for record in failed if not record.ended_by_launcher] or failed
    killed = [record for record in causes if record.signum is not None]
    return min(killed or causes, key=lambda record: record.time_ns, default=None)


def _is_failure(record: ExitRecord) -> bool:
    """Whether a rank failed, rather than being asked to end."""
    return record.code != EXIT_OK and not is_asked_for(record.code)


def _report(record: ExitRecord, attempt_dir: Path) -> str:
    path = log_path(attempt_dir, record.rank)
    head = f"rank {record.rank} ended first, with exit code {record.code}: {record.message}"
    if record.rank == 0:
        return f"{head}\nits output is above, and in {path}"  # rank 0 has been shown all along
    return f"{head}\nthe end of {path}:\n{last_lines(path)}"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _prepare_agent(launcher_pid: int) -> None:
    """Between fork and exec of the agent."""
    die_with_parent(launcher_pid)
    # Inherited by the guards and, until they have a handler, by the ranks: SIGUSR1 would end them.
    hold_pause_signal()
