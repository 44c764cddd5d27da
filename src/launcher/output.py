"""What the processes of an attempt wrote to their logs, for the console."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
