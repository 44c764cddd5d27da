"""A policy server that takes weights over the real routes and draws nothing; runs in a process of its own."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

import httpx

from tests.support.ranks import forkserver

Behaviour = Literal[
    "loads",
    "refuses",
    "refuses midway",
    "dies",
    "dies midway",
    "hangs",
    "hangs midway",
    "lies",
    "babbles",
    "forgets",
]
"""What a server does with an update; `midway` is after its second tensor; `forgets` loads it as a server does
that was started again."""
KEY = "secret"


@dataclass
class WeightServer:
    """The server, as its test sees it."""

    address: str

    def state(self) -> dict[str, Any]:
        """`version`, `num_updates`, `refusals`, `group_numbers` (0 without a broadcast), `tensors` (of the
        last version).
        """
        return pickle.loads(httpx.get(f"{self.address}/state", timeout=20).content)

    def behave(self, behaviour: Behaviour) -> None:
        """From now on, and what hangs ends."""
        httpx.post(f"{self.address}/behave", content=behaviour.encode(), timeout=20).raise_for_status()


@contextmanager
def weight_server(behaviour: Behaviour = "loads") -> Iterator[WeightServer]:
    """Run a server; it is killed in the end."""
    context = forkserver()
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(sending, behaviour), daemon=True)
    process.start()
    sending.close()
    try:
        assert receiving.poll(30), "the weight server did not start within 30 s"
        bound = receiving.recv()
        yield WeightServer(f"http://127.0.0.1:{bound}")
    finally:
        process.kill()
        process.join(10)


class _State:
    def __init__(self, behaviour: Behaviour) -> None:
        import torch

        from inference.receive.build import WeightReceiver

        self.behaviour = behaviour
        self.receiver = WeightReceiver(torch.device("cpu"))
        self.version = 0
        self.num_updates = 0
        self.refusals: list[str] = []
        self.group_numbers: list[int] = []
        self.tensors: dict[str, Any] = {}
        self.lock = threading.Lock()


def _take(state: _State, body: bytes) -> tuple[int, bytes]:
    import msgspec

    from contract.errors import PublishError
    from contract.policy import ErrorInfo, VersionInfo, WeightUpdate, encode

    update = msgspec.msgpack.decode(body, type=WeightUpdate)
    if state.behaviour == "refuses":
        return 409, encode(ErrorInfo("not today"))
    if state.behaviour == "babbles":
        return 502, b"<html>bad gateway</html>"
    if state.behaviour == "forgets":
        state.receiver.close()
    _misbehave(state, "")
    staged: dict[str, Any] = {}
    try:
        with state.receiver.open_update(update) as tensors:
            for index, (name, tensor) in enumerate(tensors):
                staged[name] = tensor
                if index == 1:
                    _misbehave(state, " midway")
                    if state.behaviour == "refuses midway":
                        raise PublishError("these are not the weights of this model")
    except PublishError as error:
        state.refusals.append(str(error))
        return 500, encode(ErrorInfo(str(error)))
    state.tensors, state.num_updates = staged, state.num_updates + 1
    state.version = update.version
    group = state.receiver._broadcasts._group
    state.group_numbers.append(0 if group is None else group.number)
    return 200, encode(VersionInfo(update.version + (state.behaviour == "lies"), update.origin))


def _misbehave(state: _State, when: str) -> None:
    if state.behaviour == f"dies{when}":
        os.kill(os.getpid(), signal.SIGKILL)
    while state.behaviour == f"hangs{when}":
        time.sleep(0.01)


def _main(channel: Connection, behaviour: Behaviour) -> None:
    import torch

    torch.set_num_threads(1)
    state = _State(behaviour)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                return self._answer(200, b"{}")
            return self._answer(200, pickle.dumps(_told(state)))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/behave":
                state.behaviour = cast("Behaviour", body.decode())
                return self._answer(200, b"")
            if self.headers["Authorization"] != f"Bearer {KEY}":
                return self._answer(401, b"")
            with state.lock:
                return self._answer(*_take(state, body))

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    channel.send(server.server_address[1])
    channel.close()
    server.serve_forever()


def _told(state: _State) -> dict[str, Any]:
    """What a test may see; bfloat16 has no array type, so tensors go as they are."""
    return {
        "version": state.version,
        "num_updates": state.num_updates,
        "refusals": state.refusals,
        "group_numbers": state.group_numbers,
        "tensors": state.tensors,
    }
