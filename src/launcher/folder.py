"""The run folder before a run: may it be used, what does `clean` delete, where does the attempt log."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from contract.errors import RunFolderError
from contract.layout import RunFolder

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

_STEP = re.compile(r"step_\d+(\.partial)?(\.old)?|superseded(_\d+)?")
_ATTEMPT = re.compile(r"attempt_(\d+)")
_OWN_ENTRIES = (
    "config", "control", "paused.json", "traces", "tensorboard", "wandb", "broadcasts", "rollouts", "channel",
    "run_id",
)  # fmt: skip
_COMPLETE = "complete.json"
_LOCK = ".lock"
_PROBE_SECONDS = 0.5


def check_usable(folder: RunFolder, *, resume: bool, clean: bool) -> None:
    """Refuse a folder that holds a run already, unless the command says what to do with it.

    Raises:
        RunFolderError: the folder holds a run, or is no folder.
    """
    if folder.root.exists() and not folder.root.is_dir():
        raise RunFolderError(f"the run folder {folder.root} is a file; choose another run_name or output_dir")
    with _readable(folder.root):
        if not folder.holds_run() or resume or clean:
            return
    raise RunFolderError(
        f"the run folder {folder.root} holds a run already, and nothing was started. "
        f"Go on with that run: --resume; delete it and start anew: --clean; "
        "keep it and start another: --run-name NAME"
    )


@contextmanager
def lock(folder: RunFolder) -> Iterator[int]:
    """Hold the run folder for the time inside: two runs in one folder would delete each other's checkpoints.

    Gives the file descriptor: the lock ends with the last process that has it open, however that ends. On
    systems without `flock` nothing is locked.

    Raises:
        RunFolderError: a live run holds it, or the folder cannot be written.
    """
    with _writable(folder.root):
        folder.root.mkdir(parents=True, exist_ok=True)
        file = (folder.root / _LOCK).open("a")
    with file:
        if not _take_lock(file):
            raise RunFolderError(
                f"a run is going on in {folder.root}, and nothing was changed there. Wait for it or "
                "end it, or start another: --run-name NAME"
            )
        yield file.fileno()


def is_running(folder: RunFolder) -> bool:
    """Whether a live run holds the run folder.

    Raises:
        RunFolderError: this system has no file locks, so nobody can know.
    """
    if fcntl is None:
        raise RunFolderError(
            f"this system has no file locks, so it cannot be seen whether a run is going on in {folder.root}"
        )
    try:
        file = (folder.root / _LOCK).open()
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _take_lock(file: IO[str]) -> bool:
    """Lock for this process; False if a run holds it, and not just a look of `is_running`."""
    if fcntl is None:
        return True
    deadline = time.monotonic() + _PROBE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.02)


def clean_run(folder: RunFolder) -> list[Path]:
    """Delete the run in `folder`: what runs write there, and nothing else. Does nothing where there is no
    run.

    Returns:
        What is still in the folder because it is not ours.

    Raises:
        RunFolderError: something cannot be deleted.
    """
    with _readable(folder.root):
        if not folder.holds_run():
            return []
        for parent, pattern in (
            (folder.checkpoints, _STEP),
            (folder.weights, _STEP),
            (folder.logs, _ATTEMPT),
        ):
            if not parent.is_dir():
                continue
            for entry in sorted(parent.iterdir()):
                if pattern.fullmatch(entry.name) or entry == folder.logs / "latest":
                    _delete(entry)
            with suppress(OSError):  # holds something that is not ours
                parent.rmdir()
        for name in _OWN_ENTRIES:
            _delete(folder.root / name)
        # Last, so that a folder that is cleaned by half still counts as one that holds a run.
        folder.metrics.unlink(missing_ok=True)
        return sorted(entry for entry in folder.root.iterdir() if entry.name != _LOCK)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file whole, so that it appears under its name only when it is complete.

    Args:
        private: it holds a key, and nobody else may read it, not even while it is written.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # its mode would stay that of whoever made it
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)


def write_config(folder: RunFolder, text: str, name: str = "sft.toml", *, private: bool = False) -> Path:
    """Write a resolved configuration into the run folder, creating the folder.

    Args:
        private: as in `write_text`.

    Raises:
        RunFolderError: it cannot be written.
    """
    path = folder.config / name
    with _writable(folder.root):
        folder.config.mkdir(parents=True, exist_ok=True)
        write_text(path, text, private=private)
    return path


def new_attempt(folder: RunFolder) -> Path:
    """Create the folder of the next attempt, and point `logs/latest` to it.

    Raises:
        RunFolderError: it cannot be written.
    """
    with _writable(folder.root):
        folder.logs.mkdir(parents=True, exist_ok=True)
        found = (_ATTEMPT.fullmatch(entry.name) for entry in folder.logs.iterdir())
        attempt = folder.logs / f"attempt_{max((int(match[1]) for match in found if match), default=0) + 1}"
        attempt.mkdir()
        link = folder.logs / f".latest_{attempt.name}"
        link.unlink(missing_ok=True)
        link.symlink_to(attempt.name)
        link.replace(folder.logs / "latest")  # a rename replaces the old link in one step
    return attempt


def check_writable(folder: RunFolder) -> None:
    """See that files can be written into the run folder, creating it.

    Raises:
        RunFolderError: they cannot.
    """
    with _writable(folder.root):
        folder.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.root) as file:
            file.write(b"\0")
            file.flush()


def _delete(path: Path) -> None:
    """Delete a file, a link (never what it points to) or a folder; a checkpoint stops being one first."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        (path / _COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(path)


@contextmanager
def _writable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"the run folder {root} cannot be written: {error.strerror} ({error.filename or root}); "
            "choose another output_dir, or make room and give yourself the right to write there"
        ) from error


@contextmanager
def _readable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"the run folder {root} cannot be used: {error.strerror} ({error.filename or root}); "
            "choose another run_name or output_dir"
        ) from error
