"""How a run is asked to pause or to save: files in its folder, answered by rank 0, and SIGUSR1. No torch.

    control/pause, control/save-now                 a request; empty
    control/pause.answer, control/save-now.answer   what the run will do about it
    paused.json                                     the run is paused

A request is taken at the end of a step, and is gone then. Requests belong to the attempt that is going on:
the next one begins by removing them. SIGUSR1 asks for a pause; since its default is to end a process, every
process of a launch holds it back (blocks it, which its children inherit) until it can answer.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from contract.attempt import write_whole
from contract.layout import RunFolder

Request = Literal["pause", "save-now"]

REQUESTS: tuple[Request, ...] = ("pause", "save-now")
PAUSE_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run does about a request: `message` says it in words, for the user who asked."""

    accepted: bool
    message: str


@dataclass(frozen=True, slots=True)
class PausedMark:
    """A run that ended before it was complete, in order.

    Attributes:
        step: updates done.
        reason: what asked for the end.
        saved: whether `step` was saved; without a step of its own an attempt has nothing to save.
        time: when, ISO 8601.
    """

    step: int
    reason: str
    saved: bool
    time: str


def ask(folder: RunFolder, request: Request) -> None:
    """Leave a request for the run that is going on in `folder`."""
    folder.control.mkdir(exist_ok=True)
    _answer_path(folder, request).unlink(missing_ok=True)
    _request_path(folder, request).touch()


def withdraw(folder: RunFolder, request: Request) -> None:
    """Take a request back, if it was not taken yet."""
    _request_path(folder, request).unlink(missing_ok=True)


def is_asked(folder: RunFolder, request: Request) -> bool:
    """Whether a request waits to be taken."""
    return os.path.exists(_request_path(folder, request))


def answer(folder: RunFolder, request: Request, reply: Answer) -> None:
    """Take a request, and say what is done about it.

    Raises:
        OSError: the answer cannot be written; the request is taken all the same.
    """
    try:
        write_whole(_answer_path(folder, request), json.dumps(asdict(reply)))
    finally:
        withdraw(folder, request)


def read_answer(folder: RunFolder, request: Request) -> Answer | None:
    """The answer to a request, or None while there is none."""
    try:
        return Answer(**json.loads(_answer_path(folder, request).read_text()))
    except FileNotFoundError:
        return None


def clear(folder: RunFolder) -> None:
    """Remove requests and answers, of which the attempt that begins must know nothing."""
    for request in REQUESTS:
        _request_path(folder, request).unlink(missing_ok=True)
        _answer_path(folder, request).unlink(missing_ok=True)


def mark_paused(folder: RunFolder, mark: PausedMark) -> None:
    """Mark the run as paused."""
    write_whole(folder.paused, json.dumps(asdict(mark)))


def read_paused(folder: RunFolder) -> PausedMark | None:
    """How the run was paused, or None if it is not."""
    try:
        return PausedMark(**json.loads(folder.paused.read_text()))
    except FileNotFoundError:
        return None


@contextmanager
def holding_pause_signal() -> Iterator[None]:
    """Hold SIGUSR1 back for the time inside: it waits for whoever installs a handler and lets it through, and
    is dropped at the end. Main thread only, before there are others.
    """
    earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {PAUSE_SIGNAL})
    # For threads that began while it was let through, and live on: to them it is not held back.
    earlier_handler = signal.signal(PAUSE_SIGNAL, lambda signum, frame: None)
    try:
        yield
    finally:
        signal.signal(PAUSE_SIGNAL, signal.SIG_IGN)  # drops one that waits
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)
        signal.signal(PAUSE_SIGNAL, earlier_handler)


@contextmanager
def letting_pause_signal_through() -> Iterator[None]:
    """Deliver SIGUSR1 for the time inside, for which there must be a handler; one that was held back comes
    first. Main thread only.
    """
    earlier_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {PAUSE_SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)


def hold_pause_signal() -> None:
    """Hold SIGUSR1 back from now on, also in programs that this process starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {PAUSE_SIGNAL})


def _request_path(folder: RunFolder, request: Request) -> Path:
    return folder.control / request


def _answer_path(folder: RunFolder, request: Request) -> Path:
    return folder.control / f"{request}.answer"
