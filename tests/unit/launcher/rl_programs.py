"""Programs for the tests of the supervisor: `supervise` runs it, `part` stands in for a part of an RL run.

python -m tests.unit.launcher.rl_programs supervise BEHAVIOUR FOLDER GRACE_SECONDS
python -m tests.unit.launcher.rl_programs part BEHAVIOUR FOLDER NAME PORT
"""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from contract.attempt import record_exit
from contract.control import PAUSE_SIGNAL, holding_pause_signal, letting_pause_signal_through
from contract.errors import EXIT_PAUSED
from launcher.ports import free_port
from launcher.running import ORCHESTRATOR, SERVER, TRAINER, PartSpec
from launcher.supervisor import RunSpec, Supervisor
from launcher.view import View

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RUN_ID = "12ab"


@holding_pause_signal()
def _supervise(behaviour: str, folder: Path, grace_seconds: float) -> int:
    port = free_port("127.0.0.1")

    def part(name: str, num_ranks: int = 0) -> PartSpec:
        module = [sys.executable, "-m", "tests.unit.launcher.rl_programs"]
        command = [*module, "part", behaviour, str(folder), name, str(port)]
        return PartSpec(name, command, {"PYTHONFAULTHANDLER": "1"}, num_ranks)

    spec = RunSpec(
        attempt_dir=folder,
        server=part(SERVER),
        orchestrator=part(ORCHESTRATOR),
        trainer=part(TRAINER, 1),
        server_urls=[f"http://127.0.0.1:{port}"],
        run_id=_RUN_ID,
        start_seconds=1.5 if behaviour in ("never_healthy", "other_run") else 60.0,
        grace_seconds=grace_seconds,
        metrics=folder / "metrics.jsonl",
        watchdog_seconds=2.0 if behaviour == "stuck" else None,
        stop_seconds=1.0,
        end_seconds=1.0 if behaviour == "orchestrator_lingers" else 60.0,
    )
    return Supervisor(spec, View(folder, folder / "metrics.jsonl", live=None)).run()


class Part:
    """A part that does nothing but behave in one way. By default it waits until it is told to end."""

    def __init__(self, folder: Path, name: str, port: int) -> None:
        self.folder = folder
        self.name = name
        self.port = port
        self.signals: list[int] = []

    def run(self, behaviour: str) -> None:
        """Behave as the method of that name and role says."""
        for signum in _SIGNALS:
            signal.signal(signum, lambda number, frame: self.signals.append(number))
        own = getattr(self, f"{self.name}_{behaviour}", None)
        if own is not None:
            own()
        if self.name == SERVER:
            self.serve()
        self.wait()

    def note(self, name: str, text: str = "") -> None:
        partial = self.folder / f".{name}"
        partial.write_text(text)
        partial.replace(self.folder / name)

    def end(self, code: int, message: str = "") -> NoReturn:
        record_exit(self.folder, 0 if self.name == TRAINER else self.name, code, message)
        sys.exit(code)

    def wait(self) -> NoReturn:
        """Until a signal; notes which ones came, and whether the server was still there."""
        self.note(f"ready_{self.name}")
        while not self.signals:
            time.sleep(0.01)
        if self.name == TRAINER:
            time.sleep(0.5)  # saves
            self.note("saved", f"{self.signals} {self.answers()}")
        self.end(128 + self.signals[0], "told to end")

    def serve(self, run_id: str = _RUN_ID) -> None:
        """Answer that all is well, in a thread."""
        server = http.server.HTTPServer(("127.0.0.1", self.port), _Health)
        server.run_id = run_id  # pyright: ignore[reportAttributeAccessIssue]
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def answers(self) -> bool:
        """Whether the policy server can be reached."""
        import socket

        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def await_file(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.01)

    def trainer_succeed(self) -> None:
        print("step 1", flush=True)
        self.end(0)

    def orchestrator_succeed(self) -> None:
        print("12:00:00 warning: slow", flush=True)
        time.sleep(1)
        self.end(0)

    def inference_succeed(self) -> None:
        print("GET /version 200\n12:00:00 warning: hot", flush=True)

    def trainer_lose_server(self) -> None:
        """Fails with an error of its own as soon as the server is gone."""
        print("training", flush=True)
        self.note("ready_trainer")
        while self.answers():
            time.sleep(0.005)
        self.end(1, "connection reset by peer")

    def inference_lose_server(self) -> None:
        print("\n".join(f"line {number}" for number in range(30)), flush=True)

    def orchestrator_moved(self) -> None:
        """Fails because somebody has moved the run folder."""
        self.await_file("ready_trainer")
        self.folder.rename(self.folder.with_name("elsewhere"))
        sys.exit(1)

    def inference_ends_well(self) -> None:
        self.serve()
        self.await_file("ready_trainer")
        sys.exit(0)

    def orchestrator_fail(self) -> None:
        """Leaves a worker behind that nobody ends."""
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.await_file("ready_trainer")
        print("why it failed", flush=True)
        self.end(7, "the cause")

    def trainer_pause(self) -> None:
        signal.signal(PAUSE_SIGNAL, lambda number, frame: self.signals.append(number))
        self.note("ready_trainer")
        with letting_pause_signal_through():
            while not self.signals:
                time.sleep(0.01)
        self.note("asked", f"{self.signals}")
        self.end(EXIT_PAUSED)

    def ignore(self) -> NoReturn:
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        if self.name == SERVER:
            self.serve()
        self.note(f"ready_{self.name}")
        while True:
            time.sleep(0.05)

    inference_ignore = orchestrator_ignore = trainer_ignore = ignore

    def inference_never_healthy(self) -> None:
        print("loading", flush=True)
        self.wait()

    def inference_other_run(self) -> None:
        """Lost the race for its port to the server of another run, which answers in its stead."""
        self.serve("34cd")
        self.wait()

    def orchestrator_stuck(self) -> None:
        self.note("ready_orchestrator")
        threading.Event().wait()

    def trainer_orchestrator_lingers(self) -> None:
        self.end(0)


class _Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"run_id": self.server.run_id}).encode())  # pyright: ignore[reportAttributeAccessIssue]

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    role, name, where, *rest = sys.argv[1:]
    if role == "supervise":
        sys.exit(_supervise(name, Path(where), float(rest[0])))
    Part(Path(where), rest[0], int(rest[1])).run(name)
