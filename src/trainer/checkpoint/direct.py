"""A file that is written past the page cache, in large aligned blocks (Linux: O_DIRECT).

A checkpoint is as large as memory and is not read again soon. Through the page cache every byte costs a
page, a copy in the kernel and the work of writing it back, on cores that the training step wants; past it
the device fetches the bytes itself. File systems that cannot do this (tmpfs, some network ones) say so when
the file is opened.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from types import TracebackType

import numpy as np

_ALIGNMENT = 4096
"""Of addresses, offsets and lengths: no less than the logical block of any disk."""

_BLOCK_BYTES = 1 << 22


def open_direct(path: str | os.PathLike[str]) -> DirectFile | None:
    """Create `path` for writing, or None where the platform or the file system has no direct writes.

    Raises:
        OSError: it cannot be created.
    """
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag, 0o666)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    return DirectFile(descriptor, path)


class DirectFile:
    """Collects what is written in one aligned block of memory, and writes it out when it is full.

    As a context manager it makes the file durable when it is left without an error, and closes it in any
    case.
    """

    def __init__(self, descriptor: int, path: str | os.PathLike[str]) -> None:
        self._descriptor = descriptor
        self._path = path
        self._block = mmap.mmap(-1, _BLOCK_BYTES)
        self._view = memoryview(self._block)
        self._target = np.frombuffer(self._block, np.uint8)
        self._used = 0
        self._size = 0
        self._is_direct = True

    def write(self, data: memoryview) -> int:
        """Take `data`, which may change as soon as this returns.

        Raises:
            OSError: a block cannot be written.
        """
        start, source = 0, np.frombuffer(data, np.uint8)
        while start < len(data):
            count = min(len(data) - start, _BLOCK_BYTES - self._used)
            # numpy copies without the interpreter's lock: the training step needs it at every operation.
            self._target[self._used : self._used + count] = source[start : start + count]
            self._used += count
            start += count
            if self._used == _BLOCK_BYTES:
                self._write_block()
        self._size += len(data)
        return len(data)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            os.close(self._descriptor)
            self._view.release()
            del self._target  # it keeps the block from being closed
            self._block.close()

    def _finish(self) -> None:
        self._write_block()
        # A last block that is not aligned was written longer.
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def _write_block(self) -> None:
        start = 0
        while start < self._used:
            stop = -(-self._used // _ALIGNMENT) * _ALIGNMENT if self._is_direct else self._used
            try:
                count = os.write(self._descriptor, self._view[start:stop])
            except OSError as error:
                if self._is_direct and error.errno == errno.EINVAL:
                    # A limit on the size of files left an odd length, or the file system wants larger blocks.
                    self._leave_direct()
                    continue
                error.filename = self._path
                raise
            start += count
            if count % _ALIGNMENT:
                # A disk that is nearly full took a part of a block, and the rest cannot follow directly.
                self._leave_direct()
        self._used = 0

    def _leave_direct(self) -> None:
        """Write the usual way from here on: it goes on, or fails with the true reason."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False
