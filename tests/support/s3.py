"""A real S3 server on this machine, and a gateway before it that can refuse requests."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.runs import wait_until

BUCKET = "runs"


@contextmanager
def s3_server(log: Path) -> Iterator[int]:
    """moto as a process of its own with an empty bucket `runs`; gives its port, and ends it afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: _answers(port), "the S3 server answers")
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        yield port
    finally:
        process.kill()
        process.wait()


def s3_environment(port: int) -> dict[str, str]:
    """Environment variables with which every S3 client of a process speaks to that port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of this process for the time inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


Answer = Callable[[str, str], int | None]
"""By method and path (with its query): the status to refuse a request with, 0 to break the connection off, or
None to hand it on.
"""


@contextmanager
def gateway(port: int, answer: Answer) -> Iterator[int]:
    """A server before the one at `port` that hands on what `answer` lets pass; gives its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status = answer(self.command, self.path)
            if status == 0:
                self.close_connection = True
                return
            if status is not None:
                code = {403: "AccessDenied"}.get(status, "Refused")
                content = f"<Error><Code>{code}</Code><Message>told to refuse</Message></Error>".encode()
                self._reply(status, {"Content-Type": "application/xml"}, content)
                return
            connection = http.client.HTTPConnection("127.0.0.1", port)
            with contextlib.closing(connection):
                headers = {name: value for name, value in self.headers.items() if name != "Expect"}
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                kept = ("Content-Length", "Transfer-Encoding", "Connection", "Date", "Server")
                passed = {name: value for name, value in response.getheaders() if name not in kept}
                length = response.getheader("Content-Length") if self.command == "HEAD" else None
                self._reply(response.status, passed, response.read(), length)

        def _reply(
            self, status: int, headers: dict[str, str], content: bytes, length: str | None = None
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
