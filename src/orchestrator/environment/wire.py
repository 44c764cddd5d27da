"""Messages between the pool and its workers: frames of JSON over a socket that user code never sees.

A frame is the length of its body (4 bytes, little-endian) and the body. JSON, because everything that passes
between the calls of an environment ends in traces and checkpoints: what arrives is JSON values and nothing
else, whatever the environment returned.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

MAX_FRAME_BYTES = 1 << 30
"""Longest body; a greater length can only mean that the two sides have lost each other."""

_LENGTH_BYTES = 4
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def encode_frame(value: Any) -> bytes:
    """A frame that holds `value`.

    Raises:
        TypeError: it holds what JSON cannot say, or is longer than MAX_FRAME_BYTES.
    """
    try:
        body = _encoder.encode(value)
    except (ValueError, RecursionError) as error:  # a lone surrogate, a structure that holds itself
        raise TypeError(str(error)) from error
    if len(body) > MAX_FRAME_BYTES:
        raise TypeError(f"{len(body)} bytes as JSON, {MAX_FRAME_BYTES} at most")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def json_copy(value: Any) -> Any:
    """`value` as it would arrive on the other side.

    Raises:
        TypeError: it holds what JSON cannot say.
    """
    return _decoder.decode(encode_frame(value)[_LENGTH_BYTES:])


class FrameReader:
    """Cuts a stream of bytes into values."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The values that `data` completes, in their order.

        Raises:
            ValueError: the bytes are no frames.
        """
        self._buffer += data
        values: list[Any] = []
        start, end = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while end - start >= _LENGTH_BYTES:
                body = start + _LENGTH_BYTES
                length = int.from_bytes(view[start:body], "little")
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                if end - body < length:
                    break
                values.append(_decoder.decode(view[body : body + length]))
                start = body + length
        del self._buffer[:start]
        return values


class FrameSocket:
    """The worker's end: waits for one value at a time, and sends one."""

    _RECEIVE_BYTES = 1 << 16

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()
        self._values: list[Any] = []
        self._pid = os.getpid()

    def receive(self) -> Any | None:
        """The next value; None when the other side has closed. Waits as long as it takes: a worker without
        work has nothing else to do, and the other side's end ends the wait."""
        while not self._values:
            data = self._connection.recv(self._RECEIVE_BYTES)
            if not data:
                return None
            self._values = self._reader.feed(data)[::-1]
        return self._values.pop()

    def send(self, frame: bytes) -> None:
        """Send an encoded frame. Ends a process that user code has forked and that came back from it: the
        call is its parent's to answer."""
        if os.getpid() != self._pid:
            os._exit(1)
        self._connection.sendall(frame)
