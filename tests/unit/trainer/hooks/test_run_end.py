"""The wait for the orchestrator's last message."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from contract import control
from contract.layout import RunFolder
from tests.support.stream import MemoryReceiver, end_message, open_source
from trainer.hooks.run_end import RunEndHook
from trainer.parallel.process import Process
from trainer.parallel.stop import Decision, Requests
from trainer.state import TrainState


def _ask(folder: RunFolder, requests: Requests) -> None:
    folder.root.mkdir(exist_ok=True)
    control.ask(folder, "pause")


def _pause_by_signal(folder: RunFolder, requests: Requests) -> None:
    requests.receive_pause(control.PAUSE_SIGNAL, None)


def _end_by_signal(folder: RunFolder, requests: Requests) -> None:
    requests.receive(signal.SIGTERM, None)


@pytest.mark.parametrize(
    ("request_end", "decided"),
    [
        (_ask, Decision("`ckpt pause`")),
        (_pause_by_signal, Decision("SIGUSR1")),
        (_end_by_signal, Decision("SIGTERM", signal.SIGTERM)),
    ],
)
def test_what_asks_for_the_end_during_the_last_evaluation_is_answered_and_ends_the_wait(
    tmp_path: Path,
    process: Process,
    request_end: Callable[[RunFolder, Requests], None],
    decided: Decision,
) -> None:
    folder, state = RunFolder(tmp_path), TrainState(step=2)
    requests = Requests(folder)
    requests.arm()

    def on_missing(sequence: int) -> None:
        assert len(receiver.waits) < 4, "the request was not heard"
        if len(receiver.waits) == 2:
            request_end(folder, requests)

    receiver = MemoryReceiver({}, on_missing)
    hook = RunEndHook(open_source(receiver, process, state), process, requests)
    assert hook.finish(state) == {}
    assert (len(receiver.waits), requests.decided) == (2, decided)
    if request_end is _ask:
        answer = control.read_answer(folder, "pause")
        assert answer is not None and answer.accepted
        assert answer.message == "the run ends after step 2, by `ckpt pause`"


def test_the_limit_of_time_ends_the_wait(process: Process) -> None:
    state = TrainState(step=2)
    requests = Requests(max_minutes=1e-9)
    requests.arm()

    def on_missing(sequence: int) -> None:
        assert len(receiver.waits) == 1, "the limit was not heeded"

    receiver = MemoryReceiver({}, on_missing)
    assert RunEndHook(open_source(receiver, process, state), process, requests).finish(state) == {}
    assert requests.decided.ending == "max_minutes = 1e-09"


def test_the_last_words_of_the_orchestrator_are_metrics_of_the_last_step(process: Process) -> None:
    state, requests = TrainState(step=2), Requests()
    source = open_source(MemoryReceiver({3: end_message(3)}), process, state)
    assert RunEndHook(source, process, requests).finish(state) == {"eval/words/mean": 0.75}
    assert requests.decided == Decision()
