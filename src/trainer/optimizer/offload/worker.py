"""One thread that works behind the training thread, in order, and how its failure gets out.

The one place of full offload where anything runs beside training: every task, every wait, every error and the
one time limit are here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from contract.errors import TailraceError

Task = Callable[[], object]


class Worker:
    """Runs tasks one after the other on a thread of its own, without gradients.

    The first task that fails is the last that runs: its error is raised by whatever is called next, on the
    calling thread.

    Args:
        name: of the thread.
        timeout_seconds: longest time without progress that a caller waits.
    """

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._tasks: deque[tuple[str, Task]] = deque()
        self._num_submitted = 0
        self._num_done = 0
        self._current = "nothing"
        self._has_limit_of_its_own = False
        self._error: BaseException | None = None
        self._was_raised = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, label: str, task: Task) -> int:
        """Run `task` after all others; returns its number.

        Args:
            label: what it does, for messages.

        Raises:
            BaseException: what an earlier task raised.
        """
        assert not self._is_closing, f"{self._name} is closed"
        with self._changed:
            self._raise_error()
            self._tasks.append((label, task))
            self._num_submitted += 1
            self._changed.notify_all()
            return self._num_submitted

    def wait_for(self, number: int) -> None:
        """Return when the task of this number is done.

        Raises:
            BaseException: what a task raised.
            TailraceError: nothing went on for `timeout_seconds`.
        """
        with self._changed:
            while self._num_done < number and self._error is None:
                # Whatever wakes this up is progress, so the limit begins anew.
                if not self._changed.wait(self._timeout_seconds) and not self._has_limit_of_its_own:
                    raise TailraceError(
                        f"{self._name} made no progress for {self._timeout_seconds:g} s while it was busy "
                        f"with {self._current}: the device or the host hangs, or is too slow; raise "
                        f"deployment.collective_timeout_seconds, or lower offload.chunk_mib"
                    )
            self._raise_error()

    def wait_idle(self) -> None:
        """Return when everything is done; raises as `wait_for`."""
        self.wait_for(self._num_submitted)

    @contextmanager
    def limit_of_its_own(self) -> Iterator[None]:
        """Inside, a task waits for something that gives up by itself: callers go on waiting for it."""
        self._set_limit_of_its_own(True)
        try:
            yield
        finally:
            self._set_limit_of_its_own(False)

    def close(self) -> None:
        """Drop the tasks that have not begun, and end the thread.

        Raises:
            BaseException: what a task raised, where nobody has been told yet.
            TailraceError: the thread does not end.
        """
        with self._changed:
            self._is_closing = True
            self._tasks.clear()
            self._changed.notify_all()
        self._thread.join(self._timeout_seconds)
        if self._thread.is_alive():
            raise TailraceError(
                f"{self._name} did not end within {self._timeout_seconds:g} s: it hangs in {self._current}"
            )
        if not self._was_raised:
            self._raise_error()

    def _set_limit_of_its_own(self, value: bool) -> None:
        with self._changed:
            self._has_limit_of_its_own = value
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._was_raised = True
            raise self._error

    def _run(self) -> None:
        with torch.no_grad():
            while self._run_next():
                pass

    def _run_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._is_closing)
            if not self._tasks:
                return False
            self._current, task = self._tasks.popleft()
        error: BaseException | None = None
        try:
            task()
        except BaseException as raised:  # whatever it is, the training thread must learn of it
            raised.add_note(f"({self._name} was busy with {self._current})")
            error = raised
        with self._changed:
            self._error = error
            if error is None:
                self._num_done += 1
                self._current = "nothing"
            else:
                self._tasks.clear()
            self._changed.notify_all()
        return error is None
