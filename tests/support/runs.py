"""Whole training runs as processes: quick ones forked from a warm interpreter, and true commands.

A fresh interpreter takes seconds to import torch and transformers. `Nursery` imports them once, in a process
that does nothing else, and forks a process per rank from it; the rank then runs the command `sft` as it is.
Several ranks get the environment that torchrun gives, so they take the way of a run under an outer torchrun.
What depends on the interpreter itself (the launcher, signals during imports) is tested with `Command`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.005
MARK = "TAILRACE_TEST_MARK"
"""Environment variable by which a test finds every process that a command left behind."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process ended: its exit code (-n after signal n) and all that it printed."""

    code: int
    output: str


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = 60.0) -> None:
    """Wait for `condition`.

    Raises:
        AssertionError: it does not become true within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(POLL_SECONDS)


class Rank:
    """A forked process."""

    def __init__(self, pid: int, log: Path, code_file: Path) -> None:
        self.pid = pid
        self._log = log
        self._code_file = code_file

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._code_file.exists()

    def send(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float = 120.0) -> Finished:
        """Wait for its end; one that takes longer is killed, and the test fails."""
        try:
            wait_until(lambda: not self.is_running(), "the end of the run", seconds=seconds)
        except AssertionError as error:
            self.send(signal.SIGKILL)
            raise AssertionError(f"{error}; it printed:\n{self.output}") from None
        return Finished(int(self._code_file.read_text()), self.output)


class Nursery:
    """The warm process and what it has forked. One for all tests; `close` ends everything."""

    def __init__(self, folder: Path, cache: Path) -> None:
        """
        Args:
            folder: for what the processes print.
            cache: where the trainer keeps tokenised rows.
        """
        self._folder = folder
        self._number = 0
        self.environment = run_environment(cache)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def start(
        self,
        arguments: Sequence[str],
        *,
        world_size: int = 1,
        file_size_limit: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[Rank]:
        """Begin `sft` with these arguments on `world_size` ranks.

        Args:
            file_size_limit: bytes beyond which a file cannot grow, as on a full disk.
        """
        shared = dict(environment or {})
        if world_size > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            shared |= {
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            }
        return [
            self._fork(arguments, file_size_limit, shared | _rank_variables(rank, world_size))
            for rank in range(world_size)
        ]

    def run(self, arguments: Sequence[str], *, world_size: int = 1, **options: Any) -> Finished:
        """`sft` from start to end; the result is rank 0's, or that of the first rank that failed."""
        ranks = self.start(arguments, world_size=world_size, **options)
        results = [rank.wait() for rank in ranks]
        return next((result for result in results if result.code), results[0])

    def close(self) -> None:
        """End the warm process and all that it forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _fork(self, arguments: Sequence[str], limit: int | None, variables: Mapping[str, str]) -> Rank:
        self._number += 1
        log, code = self._folder / f"{self._number}.log", self._folder / f"{self._number}.code"
        request = {
            "arguments": [*arguments],
            "log": str(log),
            "code": str(code),
            "variables": dict(variables),
            "file_size_limit": limit,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        log.touch()
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Rank(int(self._process.stdout.readline()), log, code)


class Command:
    """A true command in an interpreter of its own, and every process that descends from it."""

    def __init__(self, words: Sequence[str | Path], environment: Mapping[str, str], folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._log = folder / f"command_{self._mark}.log"
        with open(self._log, "wb") as output:
            self.process = subprocess.Popen(
                [str(word) for word in words],
                env={**environment, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float = 120.0) -> Finished:
        """Wait for its end; nothing may run on after it."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"no end within {seconds:g} s; it printed:\n{self.output}") from None
        left = self.descendants()
        self.kill_all()
        assert not left, f"processes {left} outlived the command; it printed:\n{self.output}"
        return Finished(code, self.output)

    def descendants(self) -> list[int]:
        """Living processes that descend from the command, itself excluded."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.process.pid]

    def kill_all(self) -> None:
        """Kill the command and its descendants."""
        for pid in [*self.descendants(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run_environment(cache: Path) -> dict[str, str]:
    """The environment of every run: this one's without what could reach a network or another run."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB_", "TORCHELASTIC_", "MASTER_", "HF_", "COVERAGE"))
        and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    }
    return {
        **kept,
        "XDG_CACHE_HOME": str(cache),
        "HF_HOME": str(cache / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "300",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {}


# What follows runs in the warm process.


def _serve() -> int:
    """Fork a process per request line; returns in each child, with its exit code, and at the end of input."""
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    codes: dict[int, Path] = {}
    while True:
        ready, _, _ = select.select([sys.stdin, reader], [], [])
        if reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)
            _reap(codes)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                break
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(reader)
                os.close(writer)
                return _run(request)
            codes[pid] = Path(request["code"])
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            _reap(codes)
    for pid in codes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return 0


def _reap(codes: dict[int, Path]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            path = codes.pop(pid)
            partial = path.with_suffix(".partial")
            partial.write_text(str(os.waitstatus_to_exitcode(status)))
            partial.replace(path)


def _run(request: Mapping[str, Any]) -> int:
    import resource

    os.setsid()
    output = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, target)
    os.environ.update(request["variables"])
    if request["file_size_limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size_limit"], resource.RLIM_INFINITY))
    from launcher.sft import main

    return main(request["arguments"])


def _preload() -> None:
    import importlib

    for name in (
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "transformers.models.llama.modeling_llama",
        "transformers.tokenization_utils_fast",
        "renderers",
        "trainer.cli",
        "launcher.sft_run",
    ):
        importlib.import_module(name)
    # The collector of a child would otherwise visit, and so copy, everything that is imported here.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _preload()
    sys.exit(_serve())
