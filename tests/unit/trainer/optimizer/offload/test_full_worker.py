"""The thread behind full offload: order, errors, the time limit and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from contract.errors import CheckpointError, TailraceError
from trainer.optimizer.offload.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    opened = Worker("the worker", 30.0)
    yield opened
    opened.close()


def fail_after(event: threading.Event) -> None:
    event.wait(30)
    raise CheckpointError("the disk is full")


def is_running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_tasks_run_in_order_on_another_thread_without_gradients(worker: Worker) -> None:
    seen: list[object] = []
    for number in range(20):
        worker.submit("a task", lambda number=number: seen.append(number))
    worker.submit("a task", lambda: seen.append((threading.current_thread().name, torch.is_grad_enabled())))
    worker.wait_idle()
    assert seen == [*range(20), ("the worker", False)]


def test_a_caller_waits_for_the_task_it_names_and_no_further(worker: Worker) -> None:
    release, seen = threading.Event(), []
    first = worker.submit("the first", lambda: seen.append(1))
    worker.submit("the second", lambda: (release.wait(30), seen.append(2)))
    worker.wait_for(first)
    assert seen == [1]
    release.set()
    worker.wait_idle()
    assert seen == [1, 2]


@pytest.mark.parametrize("call", ["wait_idle", "submit", "close"])
def test_the_first_error_comes_out_of_the_next_call_and_nothing_runs_after_it(call: str) -> None:
    release, seen = threading.Event(), []
    worker = Worker("the failing worker", 30.0)
    worker.submit("the first task", lambda: fail_after(release))
    worker.submit("the second task", lambda: seen.append("ran"))
    release.set()
    deadline = time.monotonic() + 10
    while is_running("the failing worker"):
        assert time.monotonic() < deadline, "the worker goes on after an error"
        time.sleep(0.001)
    with pytest.raises(CheckpointError, match="the disk is full") as raised:
        if call == "submit":
            worker.submit("the third task", lambda: seen.append("ran"))
        else:
            getattr(worker, call)()
    assert raised.value.__notes__ == ["(the failing worker was busy with the first task)"]
    assert seen == []
    worker.close()  # which says nothing, as the error has been raised


def test_a_hanging_task_ends_the_wait_with_its_name() -> None:
    release = threading.Event()
    worker = Worker("the hanging worker", 0.05)
    worker.submit("chunk 3", lambda: release.wait(30))
    message = r"the hanging worker made no progress for 0.05 s while it was busy with chunk 3: .*raise deploy"
    with pytest.raises(TailraceError, match=message):
        worker.wait_idle()
    with pytest.raises(TailraceError, match=r"did not end within 0.05 s: it hangs in chunk 3"):
        worker.close()
    release.set()


def test_progress_begins_the_limit_anew() -> None:
    worker = Worker("the slow worker", 0.5)
    for _ in range(8):
        worker.submit("a task", lambda: time.sleep(0.1))
    worker.wait_idle()  # 0.8 s in all
    worker.close()


def test_callers_go_on_waiting_for_a_task_that_has_a_limit_of_its_own() -> None:
    worker, seen = Worker("the patient worker", 0.05), []

    def task() -> None:
        with worker.limit_of_its_own():
            time.sleep(0.3)
        seen.append("done")

    worker.submit("a task", task)
    worker.wait_idle()
    assert seen == ["done"]
    worker.close()


def test_close_drops_what_has_not_begun_and_ends_the_thread() -> None:
    release, begun, seen = threading.Event(), threading.Event(), []
    worker = Worker("the closed worker", 30.0)
    worker.submit("the first", lambda: (begun.set(), release.wait(30), seen.append(1)))
    worker.submit("the second", lambda: seen.append(2))
    begun.wait(30)
    threading.Timer(0.05, release.set).start()
    worker.close()
    assert seen == [1]
    assert not is_running("the closed worker")
