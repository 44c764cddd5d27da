"""What the processes of an attempt wrote to their logs, for the console; and a console that may go away."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

_CHUNK_BYTES = 65536
_TAIL_LINES = 20


class Tail:
    """Reads a growing file, each byte once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def read(self) -> Iterator[bytes]:
        """What was added since the last call, in pieces; nothing while there is no file."""
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._offset)
            while chunk := file.read(_CHUNK_BYTES):
                self._offset += len(chunk)
                yield chunk

    def lines(self, *, at_end: bool = False) -> list[str]:
        """The lines that were completed since the last call.

        Args:
            at_end: nobody writes any more, so that a last line may lack its end.
        """
        *complete, self._rest = (self._rest + b"".join(self.read())).split(b"\n")
        if at_end and self._rest:
            complete.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in complete]


def last_lines(path: Path) -> str:
    """The end of a log, indented."""
    with suppress(OSError), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _CHUNK_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (empty)"
    return "    (there is none)"


def console_width() -> int:
    """Columns of the console; 120 where there is none, or a terminal that does not know its own."""
    return shutil.get_terminal_size((120, 24)).columns


@contextmanager
def lasting_console() -> Iterator[None]:
    """Let nothing that happens to the console end what goes on inside: `rl ... | head -1`, a terminal that
    was closed, a full disk behind `>`, a descriptor that was never open, an encoding without the letter. What
    cannot be shown is left out; the logs have all of it.
    """
    earlier = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_lasting(stream) for stream in earlier)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = earlier


class _LastingFile(io.FileIO):
    """A descriptor that is written to as long as that works; who writes never learns that it does not."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_told = False

    def write(self, content: Any, /) -> int:
        size = memoryview(content).nbytes
        try:
            written = super().write(content)
        except OSError as error:
            self._tell(error)
            return size
        return size if written is None else written  # None: whoever reads is slow, and the pipe does not wait

    def _tell(self, error: OSError) -> None:
        if self._is_told or self.fileno() == 2:
            return
        self._is_told = True
        text = (
            f"note: the console cannot be written ({error.strerror}); the run goes on without, and logs all\n"
        )
        with suppress(OSError):
            os.write(2, text.encode())


def _lasting(stream: TextIO | None) -> TextIO:
    if stream is None:  # the process was started with this descriptor closed
        return open(os.devnull, "w", encoding="utf-8")
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # it is in memory
        return stream
    with suppress(OSError):
        stream.flush()
    buffer = io.BufferedWriter(_LastingFile(descriptor))
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors="replace", line_buffering=True)
