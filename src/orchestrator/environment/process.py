"""One worker process as the pool sees it: what was sent to it, what came back, and its end.

Knows no queue and no source: the pool decides what is sent, and what becomes of calls without an answer. The
process is in the orchestrator's process group, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import psutil

from orchestrator.environment.wire import FrameReader, encode_frame

_MODULE = "orchestrator.environment.worker"
_DRAIN_SECONDS = 1.0


class WorkerProcess(asyncio.Protocol):
    """A started process and the socket to it. Made by `start_worker`."""

    def __init__(self, on_message: Callable[[WorkerProcess, Any], None]) -> None:
        self._on_message = on_message
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._closed = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def adopt(self, process: asyncio.subprocess.Process) -> None:
        """Say which process is at the other end."""
        self._process = process

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            values = self._reader.feed(data)
        except ValueError:  # The environment has found the socket and written to it: nothing can be trusted.
            self.kill()
            return
        for value in values:
            self._on_message(self, value)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    def send(self, value: Any) -> None:
        """Send a message. To a process that has ended it is lost."""
        self.send_frame(encode_frame(value))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(frame)

    def kill(self) -> None:
        """End the process at once, with the processes that it has started."""
        assert self._process is not None
        children = self._children()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        _kill(children)

    async def ended(self) -> int:
        """Wait until the process has ended and its last answers are read. Returns its exit code; -n for
        signal n. Waits as long as the process lives: the pool limits its calls and its start."""
        assert self._process is not None and self._transport is not None
        code = await self._process.wait()
        # A process that the environment has forked may hold the socket open: its end then never comes.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._closed), _DRAIN_SECONDS)
        self._transport.abort()
        return code

    async def close(self, seconds: float) -> None:
        """Ask the process to end, and kill it when it has not within `seconds`. What it has started ends with
        it."""
        assert self._process is not None and self._transport is not None
        children = self._children()  # when it has ended nobody knows whose they were
        self._transport.close()
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self.kill()
            await self._process.wait()  # SIGKILL has been sent: the kernel ends this wait
        _kill(children)

    def _children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).children(recursive=True)
        return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


async def start_worker(on_message: Callable[[WorkerProcess, Any], None]) -> WorkerProcess:
    """Start a process that waits for its first message.

    Args:
        on_message: called on the event loop with each message of it.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        transport, worker = await asyncio.get_running_loop().create_unix_connection(
            lambda: WorkerProcess(on_message), sock=ours
        )
        descriptor = theirs.fileno()
        command = [sys.executable, "-m", _MODULE, str(descriptor), str(os.getpid())]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=(descriptor,)
            )
        except BaseException:
            transport.abort()
            raise
    worker.adopt(process)
    return worker
