"""What the processes of one launch leave in its folder, and how they end with their parent. No torch.

`<run>/logs/attempt_K/` holds, for each process, `NAME.log` (stdout and stderr), `NAME.pid` and
`NAME.exit.json` (written once, when the process ends). The name of a trainer's rank R is `rank_R`, that of
another part of an RL run the part's (`orchestrator`, `inference`). A file appears under its name only when it
is complete. The process itself records why it failed; whoever watches over it records an end that it could
not.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1

Member = int | str
"""A process of an attempt: the global rank of a trainer's process, or the name of another part."""


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """How one process ended.

    Attributes:
        rank: global rank, or the name of the part.
        code: exit code; 128 + n after signal n.
        message: what went wrong, for the user; empty after success.
        time_ns: when, in nanoseconds since the epoch.
        signum: the signal that killed the process; None if it ended by itself.
        final: whether the process has ended; the rank's own record comes before its last steps.
        ended_by_launcher: whether it was told to end because another rank had failed, so that it is no cause.
    """

    rank: Member
    code: int
    message: str
    time_ns: int
    signum: int | None = None
    ended_by_launcher: bool = False
    final: bool = False


def log_path(attempt_dir: Path, member: Member) -> Path:
    """Everything that the process printed."""
    return attempt_dir / f"{_stem(member)}.log"


def register_rank(attempt_dir: Path, rank: Member, pid: int | None = None) -> None:
    """Say which process is `rank` (or the part of that name), so that signals find it.

    Args:
        pid: the process; None is this one.
    """
    write_whole(attempt_dir / f"{_stem(rank)}.pid", str(os.getpid() if pid is None else pid))


def read_pid(attempt_dir: Path, member: Member) -> int | None:
    """The process id of `member`, or None if it has not registered. It may have ended since."""
    try:
        return int((attempt_dir / f"{_stem(member)}.pid").read_text())
    except FileNotFoundError:
        return None


def record_exit(attempt_dir: Path, rank: Member, code: int, message: str) -> None:
    """Record how this process ends, and why. The first record of a failure stands; later ones are ignored.

    Args:
        rank: this process: its rank, or the name of the part.
        message: the error as the user should see it; empty after success.
    """
    earlier = read_exit(attempt_dir, rank)
    if earlier is None or earlier.code == 0:
        write_exit(attempt_dir, ExitRecord(rank, code, message, time.time_ns()))


def write_exit(attempt_dir: Path, record: ExitRecord) -> None:
    """Write a record, replacing any earlier one."""
    write_whole(attempt_dir / f"{_stem(record.rank)}.exit.json", json.dumps(asdict(record)))


def read_exit(attempt_dir: Path, member: Member) -> ExitRecord | None:
    """The record of `member`, or None while there is none."""
    try:
        return ExitRecord(**json.loads((attempt_dir / f"{_stem(member)}.exit.json").read_text()))
    except FileNotFoundError:
        return None


def die_with_parent(parent_pid: int | None = None, signum: int = signal.SIGTERM) -> None:
    """Have the kernel send `signum` to this process when its parent ends, however it ends. Linux; elsewhere
    nothing.

    Args:
        parent_pid: the parent as it was at the fork; if it is gone already the process ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def signal_name(signum: int) -> str:
    """For messages; real-time signals have none but a number."""
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears under its name only when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _stem(member: Member) -> str:
    """Name of the files of a process, without their ending."""
    return member if isinstance(member, str) else f"rank_{member}"
