"""Where the time of a step goes, and how fast the run is.

Spans measure on the host. On a device that works behind the host (CUDA) a span is the time in which the host
was kept busy or waiting; the work itself is attributed to the span that first waits for it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spans:
    """Seconds per named part of a step. One thread."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._step_start = clock()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time inside to `time/<name>`, also if it raises. Spans may nest; each counts its whole
        time.
        """
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def collect(self) -> dict[str, float]:
        """`time/<name>` of every span since the last `collect`, and `step_seconds`, all of the time since
        then.
        """
        now = self._clock()
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["step_seconds"] = now - self._step_start
        self.restart()
        return metrics

    def restart(self) -> None:
        """Forget what was measured; the step begins now."""
        self._seconds = {}
        self._step_start = self._clock()


class Throughput:
    """Tokens per second and time left, from the median of recent steps.

    The median: a step that saves or validates, and the first one, which compiles and allocates, are no
    measure.
    """

    def __init__(self, *, window: int = 20) -> None:
        self._rates: deque[float] = deque(maxlen=window)
        self._seconds: deque[float] = deque(maxlen=window)
        self._num_steps = 0

    def update(self, *, num_tokens: int, seconds: float, steps_left: int | None) -> dict[str, float]:
        """Count one step.

        Args:
            num_tokens: tokens of the step, over all ranks.
            seconds: time of the step, in seconds.
            steps_left: steps that are still to do; None if that is not known.

        Returns:
            `tokens_per_second` of recent steps over all ranks, and `eta_seconds` unless steps_left is None.
        """
        self._num_steps += 1
        if self._num_steps == 2:
            # From the second step on there is something better than the first.
            self._rates.clear()
            self._seconds.clear()
        if seconds > 0:
            self._rates.append(num_tokens / seconds)
            self._seconds.append(seconds)
        metrics = {"tokens_per_second": statistics.median(self._rates) if self._rates else 0.0}
        if steps_left is not None:
            metrics["eta_seconds"] = steps_left * statistics.median(self._seconds) if self._seconds else 0.0
        return metrics
