"""Start the parts of an RL run, watch them, and end them: signals, the console, the exit code.

    launcher (this module) - policy server
                           - orchestrator - environment workers
                           - trainer (of several ranks: `processes.launch`)
                           - sweeper

Invariants: when `run` returns, no process of the attempt is alive, and none is some seconds after the
launcher itself was killed. The exit code is that of the part that failed first. SIGINT, SIGTERM and SIGUSR1
go to the trainer alone, which needs the others to finish its step; they are ended when it has ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from contract.errors import EXIT_FAILURE, EXIT_OK, EXIT_PAUSED, EXIT_SIGNAL_BASE
from launcher.alive import end_within, marked_processes, send
from launcher.output import last_lines
from launcher.running import PARTS_VARIABLE, Failure, PartSpec, RunningPart, find_failure
from launcher.view import View
from launcher.watch import Progress, SignalBox, is_healthy

_POLL_SECONDS = 0.1
_HEALTH_SECONDS = 0.3
_SETTLE_SECONDS = 0.5
"""After a failure was seen: others may have failed before, and take longer to end."""
_SIGNALS_UNTIL_KILL = 3


@dataclass(frozen=True, slots=True)
class RunSpec:
    """An RL run on this machine.

    Attributes:
        server: None where the servers at `server_urls` run already.
        run_id: that the server which is started tells.
        start_seconds: longest wait for an answer of every policy server.
        grace_seconds: after a signal, the time that the trainer gets to save.
        metrics: the run's metrics file, which grows with every step.
        watchdog_seconds: longest time without growth; None has no limit.
        stop_seconds: time that the other parts get to end.
        end_seconds: time that the orchestrator gets to end after the trainer is done.
    """

    attempt_dir: Path
    server: PartSpec | None
    orchestrator: PartSpec
    trainer: PartSpec
    server_urls: list[str]
    run_id: str
    start_seconds: float
    grace_seconds: float
    metrics: Path
    watchdog_seconds: float | None
    stop_seconds: float = 10.0
    end_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class _Ending:
    """How the run ends: the exit code, what is said about it, and whether nobody gets time to end."""

    code: int
    message: str = ""
    failure: Failure | None = None
    at_once: bool = False


class Supervisor:
    """One attempt, from the first process to the last."""

    def __init__(self, spec: RunSpec, view: View, keep_open: tuple[int, ...] = ()) -> None:
        """
        Args:
            keep_open: file descriptors that every process inherits.
        """
        self._spec = spec
        self._view = view
        self._keep_open = keep_open
        self._parts: list[RunningPart] = []
        self._trainer: RunningPart | None = None
        self._signals = SignalBox()
        self._kill_at: float | None = None
        self._progress = Progress(spec.metrics, spec.watchdog_seconds)

    def run(self) -> int:
        """Run to the end; returns the exit code of the run."""
        with self._signals.handling(), self._sweeping():
            ending = _Ending(EXIT_FAILURE, at_once=True)  # after an error of this module
            try:
                ending = self._run()
                if ending.failure is not None:
                    self._view.say(f"{_what_failed(ending.failure)}; ending the other parts")
            finally:
                self._end_parts(ending)
                self._view.close(self._parts)
        for part in self._parts:
            part.record_end()
        if ending.message:
            print(ending.message, file=sys.stderr, flush=True)
        return ending.code

    def _run(self) -> _Ending:
        ending = self._start_server()
        if ending is not None:
            return ending
        orchestrator = self._start(self._spec.orchestrator)
        self._trainer = self._start(self._spec.trainer)
        self._progress.restart()
        return self._watch(orchestrator, self._trainer)

    def _start(self, spec: PartSpec) -> RunningPart:
        part = RunningPart(spec, self._spec.attempt_dir, self._keep_open)
        self._parts.append(part)
        return part

    def _start_server(self) -> _Ending | None:
        """Start the policy server and wait until all that are needed answer; None if they do."""
        server = self._spec.server
        if server is not None:
            self._start(server)
            self._view.state(server.name, "starting")
        limit = self._spec.start_seconds
        deadline = time.monotonic() + limit
        for url in self._spec.server_urls:
            while not is_healthy(url, None if server is None else self._spec.run_id):
                self._tick(_HEALTH_SECONDS)
                ending = self._before_training()
                if ending is not None:
                    return ending
                if time.monotonic() >= deadline:
                    return self._failed(
                        Failure(
                            server,
                            EXIT_FAILURE,
                            f"no answer from {url} within {limit:g} s (server_start_seconds)",
                        )
                    )
            self._view.say(f"policy server ready at {url}")
        if server is not None:
            self._view.state(server.name, "serving")
        return self._before_training()

    def _before_training(self) -> _Ending | None:
        """What ends the run before the trainer is started."""
        if self._signals.received:
            signum = self._signals.received[0]
            name = signal.Signals(signum).name
            return _Ending(
                EXIT_SIGNAL_BASE + signum,
                f"ended by {name} before training began",
                at_once=len(self._signals.received) >= _SIGNALS_UNTIL_KILL,
            )
        return self._find_failure()

    def _watch(self, orchestrator: RunningPart, trainer: RunningPart) -> _Ending:
        """Watch the parts until one of them decides how the run ends."""
        while True:
            self._tick(_POLL_SECONDS)
            code = trainer.code
            if code is not None and code - EXIT_SIGNAL_BASE in self._signals.received:
                name = signal.Signals(code - EXIT_SIGNAL_BASE).name
                return _Ending(code, f"the run was ended by {name}")
            if code == EXIT_PAUSED:
                return self._find_failure() or _Ending(EXIT_PAUSED, "the run is paused; go on with --resume")
            ending = self._find_failure()
            if ending is not None:
                return ending
            if code == EXIT_OK:
                return self._await_orchestrator(orchestrator)
            if code is not None:  # by a signal that did not come from here
                return self._failed(Failure(trainer.spec, code, "it was told to end, not by this launcher"))
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                return self._killed()
            if self._progress.is_stuck():
                return self._stuck()

    def _await_orchestrator(self, orchestrator: RunningPart) -> _Ending:
        """The trainer is done: the orchestrator must be, too."""
        deadline = time.monotonic() + self._spec.end_seconds
        while orchestrator.is_running:
            if self._signals.received:
                signum = self._signals.received[0]
                return _Ending(EXIT_SIGNAL_BASE + signum, f"ended by {signal.Signals(signum).name}")
            if time.monotonic() >= deadline:
                limit = self._spec.end_seconds
                message = f"it did not end within {limit:g} s after the trainer, which is done"
                return self._failed(Failure(orchestrator.spec, EXIT_FAILURE, message))
            self._tick(_POLL_SECONDS)
        return self._find_failure() or _Ending(EXIT_OK)

    def _tick(self, seconds: float) -> None:
        """Show output, pass signals on, and wait a little."""
        self._view.update(self._parts)
        if self._trainer is not None:
            self._signals.pass_on(self._trainer)
            if self._signals.received and self._kill_at is None:
                # The trainer ends itself after the grace time; this is for one that cannot.
                self._kill_at = time.monotonic() + self._spec.grace_seconds + self._spec.stop_seconds
        if len(self._signals.received) >= _SIGNALS_UNTIL_KILL:
            self._kill_at = time.monotonic()
        time.sleep(seconds)

    def _find_failure(self) -> _Ending | None:
        """The end by the first failure of a part; None if all do what they should."""
        if find_failure(self._parts) is None and not self._ended_servers():
            return None
        time.sleep(_SETTLE_SECONDS)
        failure = find_failure(self._parts)
        if failure is None:
            ended = self._ended_servers()[0]
            message = "the process ended by itself, though the run goes on"
            failure = Failure(ended.spec, ended.code or EXIT_FAILURE, message)
        return self._failed(failure)

    def _ended_servers(self) -> list[RunningPart]:
        """A policy server never ends by itself."""
        return [part for part in self._parts if part.spec is self._spec.server and not part.is_running]

    def _failed(self, failure: Failure) -> _Ending:
        message = _head(failure)
        if not self._spec.attempt_dir.is_dir():
            message += (
                f"\n{self._spec.attempt_dir} is not there any more: the run folder was moved or deleted "
                f"while the run went on; if it was moved, put it back and go on with --resume"
            )
        for part in self._parts:
            if part.spec is failure.part:
                message += f"\nthe end of {part.log}:\n{last_lines(part.log)}"
        return _Ending(failure.code, message, failure)

    def _killed(self) -> _Ending:
        seconds = self._spec.grace_seconds
        asked = len(self._signals.received) >= _SIGNALS_UNTIL_KILL
        reason = "third signal" if asked else f"the trainer did not end within {seconds:g} s"
        return _Ending(
            EXIT_SIGNAL_BASE + signal.SIGKILL,
            f"{reason}: everything was killed; the last committed checkpoint stands",
            at_once=True,
        )

    def _stuck(self) -> _Ending:
        """No progress: let the trainer save, and have everything else write where it stands."""
        limit = self._spec.watchdog_seconds
        assert limit is not None
        self._view.say(f"no step was finished for {limit / 60:g} minutes: ending the run")
        self._end_trainer()
        # PYTHONFAULTHANDLER makes every process print the stacks of its threads before it ends.
        for pid in self._alive():
            send(pid, signal.SIGABRT)
        time.sleep(_SETTLE_SECONDS)
        message = (
            f"no step was finished within {limit / 60:g} minutes (watchdog_minutes); where every process "
            f"stood is at the end of its log in {self._spec.attempt_dir}"
        )
        for part in self._parts:
            message += f"\nthe end of {part.log}:\n{last_lines(part.log)}"
        return _Ending(EXIT_FAILURE, message)

    def _end_parts(self, ending: _Ending) -> None:
        """See that nothing of the attempt is alive."""
        if not ending.at_once:
            self._end_trainer()
            others = [part for part in self._parts if part is not self._trainer]
            for part in others:
                part.send(signal.SIGTERM)
            self._await_end(others, self._spec.stop_seconds)
        deadline = time.monotonic() + self._spec.stop_seconds
        while True:
            for pid in self._alive():
                send(pid, signal.SIGKILL)
            # Waiting takes them out of the list of processes.
            running = [part for part in self._parts if part.is_running]
            if not (running or self._alive()) or time.monotonic() >= deadline:
                return
            time.sleep(_POLL_SECONDS / 2)

    def _end_trainer(self) -> None:
        """Have the trainer save and end; it gets its grace time."""
        if self._trainer is None or not self._trainer.is_running:
            return
        if not self._signals.received:
            self._trainer.send(signal.SIGTERM)
        self._await_end([self._trainer], self._spec.grace_seconds + self._spec.stop_seconds)

    def _await_end(self, parts: list[RunningPart], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(part.is_running for part in parts) and time.monotonic() < deadline:
            self._tick(_POLL_SECONDS)
            if len(self._signals.received) >= _SIGNALS_UNTIL_KILL:
                return

    def _alive(self) -> list[int]:
        marked = marked_processes(PARTS_VARIABLE, str(self._spec.attempt_dir))
        return marked if marked is not None else [part.pid for part in self._parts if part.is_running]

    def _what_is_left(self) -> str:
        alive = self._alive()
        if not alive:
            limit = self._spec.stop_seconds
            return f"the sweeper hung, and was killed after {limit:g} s; no process of the run is left"
        pids = ", ".join(map(str, alive))
        return (
            f"these processes of the run were killed and have not ended: {pids}; they hang in the kernel (a "
            f"device, a file system), and no run can begin in this folder until they are gone"
        )

    @contextmanager
    def _sweeping(self) -> Iterator[None]:
        """Have the sweeper wait for the end of this process for the time inside."""
        seconds = self._spec.grace_seconds + self._spec.stop_seconds
        sweeper = subprocess.Popen(
            [sys.executable, "-m", "launcher.sweeper", str(self._spec.attempt_dir), str(seconds)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=self._keep_open,
        )
        assert sweeper.stdin is not None
        try:
            yield
        finally:
            sweeper.stdin.close()
            # It ends at once, because nothing is alive any more.
            if not end_within(sweeper, self._spec.stop_seconds):
                print(self._what_is_left(), file=sys.stderr, flush=True)


def _what_failed(failure: Failure) -> str:
    if failure.part is None:
        return "the run failed"
    return f"the {failure.part.title} ended first, with exit code {failure.code}"


def _head(failure: Failure) -> str:
    return f"{_what_failed(failure)}: {failure.message}"
