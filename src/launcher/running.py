"""One part of an RL run as a process: how it is started, how it ended, and why."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from contract.attempt import (
    ExitRecord,
    Member,
    die_with_parent,
    log_path,
    read_exit,
    register_rank,
    write_exit,
)
from contract.control import hold_pause_signal
from contract.errors import EXIT_FAILURE, EXIT_OK, EXIT_SIGNAL_BASE, is_asked_for
from launcher.alive import describe_end
from launcher.processes import first_failure

PARTS_VARIABLE = "TAILRACE_PARTS"
"""Environment variable that marks every process of an RL run; its value is the attempt's folder. It is not
that of `processes`, which ends the ranks of the trainer and must leave the other parts alone."""

SERVER, ORCHESTRATOR, TRAINER = "inference", "orchestrator", "trainer"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part to start.

    Attributes:
        name: of its log, its records and its configuration.
        environment: variables beside those of this process.
        num_ranks: processes whose exit records say why it failed; 0 for a part with a record of its own.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    num_ranks: int = 0

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return {SERVER: "policy server"}.get(self.name, self.name)

    @property
    def members(self) -> list[Member]:
        """Whose exit records tell how it ended."""
        return [*range(self.num_ranks)] if self.num_ranks else [self.name]


class RunningPart:
    """A part that was started."""

    def __init__(self, spec: PartSpec, attempt_dir: Path, keep_open: tuple[int, ...]) -> None:
        """
        Args:
            keep_open: file descriptors that it inherits.
        """
        self.spec = spec
        self.log = log_path(attempt_dir, spec.name)
        self.started = time.monotonic()
        self._attempt_dir = attempt_dir
        self._ended_ns: int | None = None
        parent = os.getpid()
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.environment, PARTS_VARIABLE: str(attempt_dir)},
                # In a session of its own it gets each signal once, from here.
                start_new_session=True,
                pass_fds=keep_open,
                preexec_fn=lambda: _prepare(parent),
            )
        if not spec.num_ranks:
            register_rank(attempt_dir, spec.name, self._process.pid)

    @property
    def pid(self) -> int:
        """Its process; of several ranks, the one that watches over them."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, 128 + n after signal n; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if self._ended_ns is None:
            self._ended_ns = time.time_ns()
        return code if code >= 0 else EXIT_SIGNAL_BASE - code

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def send(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(signum)

    def failure(self) -> ExitRecord | None:
        """Why it failed or is about to; None if it runs or succeeded, or is a trainer that paused or was
        asked to end: nobody else has a reason to end before the trainer.
        """
        records = [read_exit(self._attempt_dir, member) for member in self.spec.members]
        own = first_failure([record for record in records if record is not None])
        if own is not None and not self._may_end_with(own.code):
            return own
        code = self.code
        signum = self._signum
        if code is None or (signum is None and self._may_end_with(code)):
            return None
        assert self._ended_ns is not None
        return ExitRecord(
            self.spec.name, code, describe_end(code, signum), self._ended_ns, signum, final=True
        )

    @property
    def _signum(self) -> int | None:
        """The signal that killed it."""
        code = self._process.poll()
        return -code if code is not None and code < 0 else None

    def _may_end_with(self, code: int) -> bool:
        return code == EXIT_OK or (self.spec.num_ranks > 0 and is_asked_for(code))

    def record_end(self) -> None:
        """Leave a record of an end of which the part could leave none itself."""
        code = self.code
        if code is None or self.spec.num_ranks or read_exit(self._attempt_dir, self.spec.name) is not None:
            return
        signum = self._signum
        message = "" if code == EXIT_OK else describe_end(code, signum)
        record = ExitRecord(
            self.spec.name, code, message, self._ended_ns or time.time_ns(), signum, final=True
        )
        # For who looks later: a disk that is full takes nothing from how the run ended.
        with suppress(OSError):
            write_exit(self._attempt_dir, record)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a run.

    Attributes:
        part: None if no part, but the launcher itself gave up.
    """

    part: PartSpec | None
    code: int
    message: str


def find_failure(parts: list[RunningPart]) -> Failure | None:
    """The failure that caused the others, by the rules of `processes.first_failure`."""
    found = {part: record for part in parts if (record := part.failure()) is not None}
    first = first_failure([*found.values()])
    for part, record in found.items():
        if record is first:
            rank = f"rank {record.rank}: " if part.spec.num_ranks > 1 else ""
            return Failure(part.spec, record.code or EXIT_FAILURE, f"{rank}{record.message}")
    return None


def _prepare(parent: int) -> None:
    """Between fork and exec."""
    die_with_parent(parent, signal.SIGTERM)
    # Its default would end a part that cannot answer yet, or never does.
    hold_pause_signal()
