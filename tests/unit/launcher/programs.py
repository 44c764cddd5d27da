"""Programs for the tests of launching: `launch` calls the launcher, `rank` stands in for the trainer.

python -m tests.unit.launcher.programs launch BEHAVIOUR FOLDER NUM_PROCESSES GRACE_SECONDS STOP_SECONDS
python -m tests.unit.launcher.programs rank BEHAVIOUR FOLDER
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from contract.attempt import record_exit
from contract.control import PAUSE_SIGNAL, letting_pause_signal_through
from contract.errors import EXIT_PAUSED
from launcher.processes import launch
from launcher.spec import LaunchSpec


def _launch(
    behaviour: str, folder: Path, num_processes: int, grace_seconds: float, stop_seconds: float
) -> int:
    command = [sys.executable, "-m", "tests.unit.launcher.programs", "rank", behaviour, str(folder)]
    return launch(LaunchSpec(command, num_processes, folder, 1, grace_seconds, stop_seconds))


class Rank:
    """A rank that does nothing but behave in one way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.signals: list[int] = []

    def ready(self) -> None:
        (self.folder / f"ready_{self.rank}").write_text("")

    def sleep_forever(self) -> NoReturn:
        while True:
            time.sleep(0.05)

    def end(self, code: int, message: str = "") -> NoReturn:
        record_exit(self.folder, self.rank, code, message)
        sys.exit(code)

    def succeed(self) -> None:
        """Ends well."""
        print(
            f"rank {self.rank} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_ADDR']}, "
            f"{os.environ['OMP_NUM_THREADS']} thread",
            flush=True,
        )
        self.end(0)

    def fail(self) -> None:
        """Rank 1 fails; rank 0 complains, hangs and does not listen to signals."""
        if self.rank == 1:
            while not (self.folder / "ready_0").exists():
                time.sleep(0.01)
            time.sleep(0.5)
            print("\n".join(f"line {number}" for number in range(100)), flush=True)
            self.end(7, "the cause")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("before", flush=True)
        self.ready()
        while not (self.folder / "rank_1.exit.json").exists():
            time.sleep(0.001)
        print("connection reset by peer", flush=True)
        self.sleep_forever()

    def lose_peer(self) -> None:
        """Rank 0 waits; rank 1 fails with an error of its own as soon as rank 0 is gone."""
        subprocess.Popen(["sleep", "600"])  # a helper process that nobody ends
        self.ready()
        pid_file = self.folder / "rank_0.pid"
        while self.rank == 0 or _is_running(int(pid_file.read_text())):
            time.sleep(0.005)
        self.end(1, "connection reset by peer")

    def save(self) -> None:
        """After a signal rank 1 ends at once; rank 0 needs longer, also to leave after it recorded its exit.
        It notes every signal it gets.
        """
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda number, frame: self.signals.append(number))
        self.ready()
        while not self.signals:
            time.sleep(0.01)
        if self.rank == 0:
            time.sleep(1)
            record_exit(self.folder, self.rank, 128 + self.signals[0], "saved")
            time.sleep(1)
            (self.folder / "saved").write_text(",".join(map(str, self.signals)))
        self.end(128 + self.signals[0], "saved")

    def save_slowly(self) -> None:
        """Saves for a minute after a signal, but ends at once after a second one."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda number, frame: self.signals.append(number))
        self.ready()
        while len(self.signals) < 2:
            if self.signals:
                (self.folder / f"saving_{self.rank}").write_text("")
            time.sleep(0.01)
        self.end(128 + self.signals[1], "at once")

    def pause(self) -> None:
        """Can answer a pause only after a while; then rank 1 is quick to end, and rank 0 needs longer. Each
        notes how often it was asked.
        """
        self.ready()
        time.sleep(1)
        signal.signal(PAUSE_SIGNAL, lambda number, frame: self.signals.append(number))
        with letting_pause_signal_through():
            while not self.signals:
                time.sleep(0.01)
            time.sleep(2 if self.rank == 0 else 0.5)
        (self.folder / f"asked_{self.rank}").write_text(str(len(self.signals)))
        self.end(EXIT_PAUSED)

    def pause_and_fail(self) -> None:
        """Rank 1 pauses; rank 0 fails after that."""
        if self.rank == 1:
            self.end(EXIT_PAUSED)
        while not (self.folder / "rank_1.exit.json").exists():
            time.sleep(0.01)
        self.end(7, "the cause")

    def ignore(self) -> None:
        """Does not listen to signals."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        self.ready()
        self.sleep_forever()

    def wait(self) -> None:
        """Waits, and ends as signals end a program."""
        self.ready()
        self.sleep_forever()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    role, name, where, *numbers = sys.argv[1:]
    if role == "launch":
        sys.exit(_launch(name, Path(where), int(numbers[0]), float(numbers[1]), float(numbers[2])))
    getattr(Rank(Path(where)), name)()
