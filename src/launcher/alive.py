"""Living processes of an attempt, found by the mark in their environment, and signals to them."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from contract.attempt import signal_name

_KILLED_SECONDS = 5.0
"""A process that was killed ends at once, unless it hangs in the kernel: in a device or a file system."""


def send(pid: int, signum: int) -> bool:
    """Send a signal; False if there is no such process."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def end_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the end of a child, and kill it after `seconds`. Returns whether it ended by itself."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_SECONDS)
    return False


def marked_processes(variable: str, value: str) -> list[int] | None:
    """Living processes that were started with `variable` = `value` in their environment, whoever their parent
    is; None where there is no /proc.
    """
    if not Path("/proc/self/environ").exists():
        return None
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # ended meanwhile, or of another user; a zombie's environment is empty
            if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def describe_end(code: int, signum: int | None) -> str:
    """How a process ended that did not say why.

    Args:
        signum: the signal that killed it; None if it ended by itself.
    """
    if signum is None:
        return f"the process ended with exit code {code} without saying why"
    memory = " (the kernel does this when memory runs out)" if signum == signal.SIGKILL else ""
    return f"the process was killed by {signal_name(signum)}{memory}"
