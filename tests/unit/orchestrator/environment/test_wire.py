from __future__ import annotations

import json
import random
import socket
import threading

import pytest

from orchestrator.environment.wire import MAX_FRAME_BYTES, FrameReader, FrameSocket, encode_frame, json_copy

VALUES = [None, 3, 1.5, "", "ü\n\U0001f600", [1, [2, {"a": []}]], {"n": 10**40}, {"long": "x" * 70_000}, True]


def test_a_frame_is_the_length_and_the_json() -> None:
    frame = encode_frame({"a": [1, "ü"]})
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert json.loads(frame[4:]) == {"a": [1, "ü"]}


def test_any_cut_of_the_stream_gives_the_same_values() -> None:
    stream = b"".join(map(encode_frame, VALUES))
    for seed in range(20):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(1, len(stream)), 30))
        reader, found = FrameReader(), []
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            found += reader.feed(stream[begin:end])
        assert found == VALUES


def test_what_is_no_frame_is_an_error() -> None:
    with pytest.raises(ValueError, match="frame of"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_values_arrive_over_a_socket_and_its_end_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            for value in VALUES:
                FrameSocket(theirs).send(encode_frame(value))
            theirs.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        ours.settimeout(30)
        receiver = FrameSocket(ours)
        assert [receiver.receive() for _ in VALUES] == VALUES
        assert receiver.receive() is None
        sender.join()


@pytest.mark.parametrize("value", [object(), {"a": object()}, "\ud800", 1j])
def test_what_json_cannot_hold_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError):
        json_copy(value)


def test_what_holds_itself_is_a_type_error() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(TypeError):
        json_copy(endless)
