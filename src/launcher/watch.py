"""What the launcher of an RL run looks at: signals to itself, the health of servers, the run's progress."""

from __future__ import annotations

import http.client
import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from contract.control import PAUSE_SIGNAL, letting_pause_signal_through
from contract.policy import HEALTH_ROUTE
from launcher.running import RunningPart

_HEALTH_TIMEOUT_SECONDS = 2.0


class SignalBox:
    """Signals that the launcher received, and how many of them the trainer has had.

    Attributes:
        received: SIGINT and SIGTERM in order; a closed terminal (SIGHUP) counts as SIGTERM, which the trainer
            knows.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._delivered = 0
        self._num_pauses = 0
        self._pauses_delivered = 0

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Take the signals of this process for the time inside. On the main thread."""
        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            handled.append(signal.SIGHUP)
        earlier = {signum: signal.signal(signum, self._remember) for signum in handled}
        earlier[PAUSE_SIGNAL] = signal.signal(PAUSE_SIGNAL, self._remember_pause)
        try:
            with letting_pause_signal_through():
                yield
        finally:
            for signum, handler in earlier.items():
                signal.signal(signum, handler)

    def pass_on(self, part: RunningPart) -> None:
        """Send `part` the next signal that it has not had. One per call: two equal ones that are pending
        together count as one.
        """
        if self._pauses_delivered < self._num_pauses:
            self._pauses_delivered += 1
            part.send(PAUSE_SIGNAL)
        if self._delivered < len(self.received):
            self._delivered += 1
            part.send(self.received[self._delivered - 1])

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signal.SIGTERM if signum == signal.SIGHUP else signum)

    def _remember_pause(self, signum: int, frame: FrameType | None) -> None:
        self._num_pauses += 1


class Progress:
    """Whether a file that grows with every step has grown lately."""

    def __init__(self, path: Path, limit_seconds: float | None) -> None:
        """
        Args:
            limit_seconds: None has no limit.
        """
        self._path = path
        self._limit = math.inf if limit_seconds is None else limit_seconds
        self._size = -1
        self._changed = time.monotonic()

    def restart(self) -> None:
        """Time counts from now."""
        self._changed = time.monotonic()

    def is_stuck(self) -> bool:
        """Whether the file has not grown within the limit."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size != self._size:
            self._size = size
            self._changed = time.monotonic()
        return time.monotonic() - self._changed >= self._limit


def is_healthy(url: str, run_id: str | None = None) -> bool:
    """Whether the policy server at `url` says that it can draw.

    Args:
        run_id: run that it must belong to: two runs that start at once may have found the same port free.
            None takes any.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_HEALTH_TIMEOUT_SECONDS)
    try:
        connection.request("GET", HEALTH_ROUTE)
        response = connection.getresponse()
        if response.status != 200 or run_id is None:
            return response.status == 200
        state = json.loads(response.read())
        return isinstance(state, dict) and state.get("run_id") == run_id
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
