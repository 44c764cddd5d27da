"""The rollout channel as files in the run folder.

In `<run>/channel`: `session_<id>/frame_N`, a frame of the sender that is named in `sender`; `receiver`, who
receives and what it has acknowledged; `sender`, who sends, to whom, and what has been acknowledged to it.

Invariants: a name appears when its content is complete, never before. A receiver reads frames of a sender
that has answered it by its own id, so a sender of an earlier attempt has no frames for it, whatever it left
behind and whichever end starts first; and an acknowledgement counts if it names this very sender. Nobody
lists a folder: whatever is waited for has one name.

Nothing is forced to the disk. A process that is killed leaves what it wrote to the system, which keeps it;
and when the machine itself fails the run goes on from a checkpoint, whose sender removes all frames that it
finds.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from contract.channel.rules import check_order, gone
from contract.errors import ChannelError

logger = logging.getLogger(__name__)

_RECEIVER_POLL_SECONDS = 0.01
_SENDER_POLL_SECONDS = 0.05
_PARTIAL = ".partial"


class _FromReceiver(msgspec.Struct, frozen=True):
    """Content of `receiver`; `sender` is empty until one has answered."""

    receiver: str
    sender: str
    acknowledged: int


class _FromSender(msgspec.Struct, frozen=True):
    """Content of `sender`; `receiver` is empty until one has come."""

    sender: str
    receiver: str
    acknowledged: int


_Note = TypeVar("_Note", _FromReceiver, _FromSender)


class FilesystemSender:
    """See `contract.channel.base.Sender`. Made inside a running event loop.

    Raises:
        ChannelError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._id = uuid.uuid4().hex
        self._frames = folder / f"session_{self._id}"
        self._heard = _FromReceiver("", "", 0)
        self._first: int | None = None
        self._last: int | None = None
        self._acknowledged = 0
        with _explained(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob("session_*"):
                shutil.rmtree(leftover)
            self._frames.mkdir()
            self._answer()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def send(self, sequence: int, frame: bytes) -> None:
        """See `Sender`."""
        self._raise_if_failed()
        check_order(self._last, sequence)
        await asyncio.to_thread(self._write_frame, sequence, frame)
        self._first = sequence if self._first is None else self._first
        self._last = sequence

    async def acknowledged(self) -> int:
        """See `Sender`."""
        self._raise_if_failed()
        return self._acknowledged

    async def receiver(self) -> str | None:
        """See `Sender`."""
        self._raise_if_failed()
        # One that has not answered this sender may have ended long ago.
        return self._heard.receiver if self._heard.sender == self._id else None

    async def close(self) -> None:
        """See `Sender`."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        shutil.rmtree(self._frames, ignore_errors=True)

    def _write_frame(self, sequence: int, frame: bytes) -> None:
        with _explained(self._folder, "written"):
            _write(self._frames / f"frame_{sequence}", frame)

    async def _watch(self) -> None:
        """Answer receivers, and take their acknowledgements."""
        while True:
            self._listen()
            await asyncio.sleep(_SENDER_POLL_SECONDS)

    def _listen(self) -> None:
        with _explained(self._folder, "read"):
            heard = _read(self._folder / "receiver", _FromReceiver)
        if heard is None or heard == self._heard:
            return
        if heard.receiver != self._heard.receiver:
            logger.info("a receiver has joined the channel %s", self._folder)
        self._heard = heard
        before = self._acknowledged
        if heard.sender == self._id:
            self._acknowledged = max(before, heard.acknowledged)
        with _explained(self._folder, "written"):
            self._answer()
            if self._first is not None and self._last is not None:
                for sequence in range(max(self._first, before + 1), min(self._last, self._acknowledged) + 1):
                    (self._frames / f"frame_{sequence}").unlink(missing_ok=True)

    def _answer(self) -> None:
        note = _FromSender(self._id, self._heard.receiver, self._acknowledged)
        _write(self._folder / "sender", msgspec.json.encode(note))

    def _raise_if_failed(self) -> None:
        if self._task.done():
            self._task.result()


class FilesystemReceiver:
    """See `contract.channel.base.Receiver`, and `contract.channel.build.open_receiver`.

    Raises:
        ChannelError: the folder cannot be written.
    """

    def __init__(self, folder: Path, receiver_id: str) -> None:
        self._folder = folder
        self._id = receiver_id
        self._sender = ""
        self._acknowledged = 0
        self._gone = 0
        with _explained(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
        self._tell()

    def receive(self, sequence: int, timeout_seconds: float) -> bytes | None:
        """See `Receiver`."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._follow()
            if sequence <= max(self._acknowledged, self._gone):
                raise gone(sequence)
            frame = self._read_frame(sequence) if self._sender else None
            left = deadline - time.monotonic()
            if frame is not None or left <= 0:
                return frame
            time.sleep(min(_RECEIVER_POLL_SECONDS, left))

    def acknowledge(self, sequence: int) -> None:
        """See `Receiver`."""
        self._acknowledged = max(self._acknowledged, sequence)
        self._tell()

    def close(self) -> None:
        """See `Receiver`. What was acknowledged stays written: the sender may not have read it yet."""

    def _follow(self) -> None:
        """Find the sender that answers this receiver."""
        with _explained(self._folder, "read"):
            note = _read(self._folder / "sender", _FromSender)
        if note is None or note.receiver != self._id:
            return
        self._gone = note.acknowledged
        if note.sender != self._sender:
            self._sender = note.sender
            self._tell()

    def _tell(self) -> None:
        note = _FromReceiver(self._id, self._sender, self._acknowledged)
        with _explained(self._folder, "written"):
            _write(self._folder / "receiver", msgspec.json.encode(note))

    def _read_frame(self, sequence: int) -> bytes | None:
        path = self._folder / f"session_{self._sender}" / f"frame_{sequence}"
        with _explained(self._folder, "read"):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None


def _write(path: Path, content: bytes) -> None:
    """`content` under its name at once or not at all."""
    partial = path.with_name(path.name + _PARTIAL)
    # Closed before it gets its name: a network file system hands a file on to other machines when it is
    # closed.
    partial.write_bytes(content)
    partial.rename(path)


def _read(path: Path, kind: type[_Note]) -> _Note | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ChannelError(
            f"{path} is damaged ({error}); end the run, remove {path.parent}, and go on with --resume"
        ) from error


@contextmanager
def _explained(folder: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ChannelError(
            f"channel.type = 'filesystem', but {error.filename or folder} cannot be {verb}: "
            f"{error.strerror}; free space or mend the rights of {folder}, or set channel.type = 'zmq'"
        ) from error
