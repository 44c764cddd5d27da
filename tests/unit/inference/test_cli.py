"""The process of a policy server: how it starts, ends, and what it leaves. Real processes and signals.

Most of the time is their start: all of them start at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from contract.attempt import ExitRecord, read_exit, read_pid
from contract.policy import GenerateResponse, encode
from inference.server import bind
from tests.unit.inference.serving import request

_ROOT = Path(__file__).parents[3]
_SCENARIOS = (
    "idle",
    "busy",
    "slow-start",
    "failing",
    "never-closing",
    "never-closing-2",
    "taken",
    "bad-config",
)


class Server:
    """One process."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        with bind("127.0.0.1", None) as free:
            self.port = free.getsockname()[1]
        self.held = bind("127.0.0.1", self.port) if name == "taken" else None
        if self.held is not None:
            self.held.listen()
        config = folder / "config.toml"
        key = "prot" if name == "bad-config" else "port"
        config.write_text(f'{key} = {self.port}\n[model]\nname = "m"\n')
        words = [name.removesuffix("-2"), str(config), str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.inference.programs", *words],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self) -> None:
        self.wait_for_health(lambda health: health["status"] == "ok")

    def wait_for_health(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + 60
        with httpx.Client(base_url=self.url, timeout=5) as client:
            while True:
                assert self.process.poll() is None, self.process.communicate()
                assert time.monotonic() < deadline, "the server does not become as it should"
                try:
                    if condition(client.get("/health").json()):
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.02)

    def finish(self) -> tuple[int, str, ExitRecord]:
        """Exit code, output and record."""
        output, _ = self.process.communicate(timeout=30)
        record = read_exit(self.folder, "inference")
        assert record is not None and record.code == self.process.returncode
        return self.process.returncode, output, record

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        if self.held is not None:
            self.held.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("servers")
    started = {name: Server(name, folder / name) for name in _SCENARIOS}
    yield started
    for server in started.values():
        server.end()


def test_a_signal_ends_it_with_its_code_and_frees_the_port(servers: dict[str, Server]) -> None:
    server = servers["idle"]
    server.wait_until_ready()
    assert read_pid(server.folder, "inference") == server.process.pid
    status = json.loads((server.folder / "inference.status.json").read_text())  # for the launcher's panel
    assert status == {"version": 0, "running": 0, "waiting": 0, "tokens": 0}
    server.process.send_signal(signal.SIGTERM)
    code, output, record = server.finish()
    assert code == 128 + signal.SIGTERM and record.message == "ended by SIGTERM"
    assert f"http://127.0.0.1:{server.port}" in output and "Traceback" not in output
    assert (server.folder / "closed").exists()
    bind("127.0.0.1", server.port).close()


def test_running_requests_are_answered_with_what_they_have(servers: dict[str, Server]) -> None:
    server = servers["busy"]
    server.wait_until_ready()
    answers: list[httpx.Response] = []
    running, waiting = (encode(request(name, [5], max_tokens=10**8)) for name in ("running", "waiting"))

    def ask(content: bytes) -> None:
        answers.append(httpx.post(f"{server.url}/generate", content=content, timeout=60))

    threads = [threading.Thread(target=ask, args=(running,))]
    threads[0].start()
    server.wait_for_health(lambda health: health["progress"]["drawn_tokens"] > 0)
    httpx.post(f"{server.url}/pause")
    threads.append(threading.Thread(target=ask, args=(waiting,)))
    threads[1].start()
    server.wait_for_health(lambda health: health["waiting"] == 1)
    server.process.send_signal(signal.SIGINT)
    assert server.finish()[0] == 128 + signal.SIGINT
    for thread in threads:
        thread.join(timeout=30)
    refused, aborted = sorted(answers, key=lambda answer: -answer.status_code)
    assert refused.status_code == 503 and b"SIGINT" in refused.content
    drawn = msgspec.msgpack.decode(aborted.content, type=GenerateResponse)
    assert drawn.finish_reason == "abort" and set(drawn.tokens) == {5}


def test_a_signal_during_the_start_ends_it(servers: dict[str, Server]) -> None:
    server = servers["slow-start"]
    server.wait_for("loading")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    server.process.send_signal(signal.SIGINT)
    code, output, record = server.finish()
    assert code == 128 + signal.SIGINT and "while the policy server started" in record.message
    assert "Traceback" not in output


def test_a_failed_engine_ends_it_with_the_reason(servers: dict[str, Server]) -> None:
    server = servers["failing"]
    server.wait_until_ready()
    httpx.post(f"{server.url}/pause")
    code, output, record = server.finish()
    assert code == 1 and "RuntimeError: out of memory" in record.message
    assert f"Error: {record.message}" in output


def test_what_hangs_at_the_end_is_left_behind(servers: dict[str, Server]) -> None:
    server = servers["never-closing"]
    server.wait_until_ready()
    server.process.send_signal(signal.SIGTERM)
    code, _, record = server.finish()
    assert code == 128 + signal.SIGTERM and "did not end within 2 s" in record.message


def test_a_second_signal_ends_it_at_once(servers: dict[str, Server]) -> None:
    server = servers["never-closing-2"]
    server.wait_until_ready()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    server.process.send_signal(signal.SIGINT)
    code, _, record = server.finish()
    assert code == 128 + signal.SIGINT and "second signal" in record.message


def test_a_taken_port_is_said_before_the_model_is_loaded(servers: dict[str, Server]) -> None:
    server = servers["taken"]
    code, output, record = server.finish()
    assert code == 2 and f"port = {server.port}" in record.message and "Error: " in output
    assert not (server.folder / "loading").exists()


def test_a_wrong_configuration_is_recorded(servers: dict[str, Server]) -> None:
    code, output, record = servers["bad-config"].finish()
    assert code == 2 and "prot" in record.message and "prot" in output


def test_the_command_holds_pause_signals_back_and_names_its_arguments(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = tmp_path / "config.toml"
        config.write_text(f'port = {taken.getsockname()[1]}\n[model]\nname = "m"\n')
        command = [sys.executable, "-m", "inference", str(config), str(tmp_path)]
        result = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=60, env=os.environ, check=False
        )
    assert result.returncode == 2, result.stderr
    record = read_exit(tmp_path, "inference")
    assert record is not None and "port" in record.message
