"""One contract for every kind of channel: the tests of this file run over each of them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from contract.channel.base import Receiver, Sender
from contract.channel.build import open_receiver, open_sender
from contract.errors import ChannelError
from contract.layout import RunFolder
from contract.sections import ChannelConfig, FilesystemChannelConfig, ZmqChannelConfig

T = TypeVar("T")
LIMIT = 20.0


class Way:
    """A channel in a run folder of its own."""

    def __init__(self, config: ChannelConfig, root: Path) -> None:
        self.config = config
        self.folder = RunFolder(root)

    def sender(self) -> Sender:
        return open_sender(self.config, self.folder)

    def receiver(self, receiver_id: str | None = None) -> Receiver:
        return open_receiver(self.config, self.folder, receiver_id or uuid.uuid4().hex)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(params=["filesystem", "zmq"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    if request.param == "filesystem":
        return Way(FilesystemChannelConfig(), tmp_path)
    return Way(ZmqChannelConfig(port=free_port()), tmp_path)


def run(main: Callable[[], Awaitable[T]]) -> T:
    """On an event loop, with a time limit; no thread may be left."""
    before = set(threading.enumerate())

    async def limited() -> T:
        return await asyncio.wait_for(main(), LIMIT)

    result = asyncio.run(limited())
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not left, f"threads left: {left}"
    return result


async def receive(receiver: Receiver, sequence: int, timeout_seconds: float = LIMIT) -> bytes | None:
    return await asyncio.to_thread(receiver.receive, sequence, timeout_seconds)


async def until_acknowledged(sender: Sender, sequence: int) -> None:
    while await sender.acknowledged() < sequence:
        await asyncio.sleep(0.01)


def test_frames_come_in_order_and_an_acknowledgement_goes_back(way: Way) -> None:
    async def main() -> None:
        sender, receiver = way.sender(), way.receiver()
        assert await sender.acknowledged() == 0
        for sequence in (4, 5, 6):
            await sender.send(sequence, b"frame %d" % sequence)
        for sequence in (4, 5, 6):
            assert await receive(receiver, sequence) == b"frame %d" % sequence
        await asyncio.to_thread(receiver.acknowledge, 5)
        await until_acknowledged(sender, 5)
        assert await sender.acknowledged() == 5
        await asyncio.to_thread(receiver.close)
        await sender.close()

    run(main)


def test_a_frame_that_is_not_sent_yet_is_waited_for_and_then_delivered(way: Way) -> None:
    async def main() -> None:
        receiver = way.receiver()
        assert await receive(receiver, 1, 0.05) is None
        sender = way.sender()
        assert await receive(receiver, 1, 0.3) is None
        waiting = asyncio.create_task(receive(receiver, 1))
        await asyncio.sleep(0.1)
        await sender.send(1, b"late")
        assert await waiting == b"late"
        await asyncio.to_thread(receiver.close)
        await sender.close()

    run(main)


def test_a_receiver_without_any_sender_gives_up_in_time(way: Way) -> None:
    receiver = way.receiver()
    start = time.monotonic()
    assert receiver.receive(1, 0.2) is None
    assert time.monotonic() - start >= 0.2
    receiver.close()


def test_a_receiver_that_comes_back_gets_what_was_not_acknowledged_again(way: Way) -> None:
    async def main() -> None:
        sender, receiver = way.sender(), way.receiver()
        await sender.send(1, b"one")
        await sender.send(2, b"two")
        assert await receive(receiver, 1) == b"one"
        await asyncio.to_thread(receiver.acknowledge, 1)
        await until_acknowledged(sender, 1)
        assert await receive(receiver, 2) == b"two"
        assert await receive(receiver, 2) == b"two"
        await asyncio.to_thread(receiver.close)
        again = way.receiver()
        assert await receive(again, 2) == b"two"
        with pytest.raises(ChannelError, match="frame 1 was acknowledged before and is gone"):
            await receive(again, 1)
        await asyncio.to_thread(again.close)
        await sender.close()

    run(main)


def test_a_receiver_follows_a_sender_that_comes_back(way: Way) -> None:
    async def main() -> None:
        sender, receiver = way.sender(), way.receiver()
        await sender.send(1, b"one")
        assert await receive(receiver, 1) == b"one"
        await asyncio.to_thread(receiver.acknowledge, 1)
        await until_acknowledged(sender, 1)
        await sender.send(2, b"of the first sender, never received")
        await sender.close()
        second = way.sender()
        assert await second.acknowledged() == 0
        await second.send(2, b"of the second sender")
        assert await receive(receiver, 2) == b"of the second sender"
        await until_acknowledged(second, 1)
        await asyncio.to_thread(receiver.close)
        await second.close()

    run(main)


def test_what_another_attempt_left_is_never_handed_out_nor_counted(way: Way) -> None:
    leftovers: dict[Path, bytes] = {}

    async def attempt() -> None:
        sender, receiver = way.sender(), way.receiver()
        for sequence in (1, 2, 3):
            await sender.send(sequence, b"of the first attempt")
        assert await receive(receiver, 2) == b"of the first attempt"
        await asyncio.to_thread(receiver.acknowledge, 2)
        await until_acknowledged(sender, 2)
        # Neither end is closed by rule: both were killed.
        await asyncio.to_thread(receiver.close)
        leftovers.update({path: path.read_bytes() for path in way.folder.root.rglob("*") if path.is_file()})
        await sender.close()

    def restore() -> None:
        for path, content in leftovers.items():
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(content)

    async def next_attempt_that_starts_with_the_sender() -> None:
        sender = way.sender()
        await sender.send(1, b"of the second attempt")
        await asyncio.sleep(0.2)
        assert await sender.acknowledged() == 0
        await sender.close()

    async def next_attempt_that_starts_with_the_receiver() -> None:
        receiver = way.receiver()
        assert await receive(receiver, 3, 0.2) is None
        sender = way.sender()
        assert await receive(receiver, 3, 0.3) is None
        await sender.send(2, b"of the second attempt")
        assert await receive(receiver, 2) == b"of the second attempt"
        assert await sender.acknowledged() == 0
        await asyncio.to_thread(receiver.close)
        await sender.close()

    run(attempt)
    for next_attempt in (
        next_attempt_that_starts_with_the_sender,
        next_attempt_that_starts_with_the_receiver,
    ):
        restore()
        run(next_attempt)


def test_an_acknowledgement_is_heard_although_the_receiver_ends_right_after_it(way: Way) -> None:
    async def main() -> None:
        sender, receiver = way.sender(), way.receiver()
        await sender.send(1, b"the end")

        def finish() -> None:
            assert receiver.receive(1, LIMIT) == b"the end"
            receiver.acknowledge(1)
            receiver.close()

        await asyncio.to_thread(finish)
        await until_acknowledged(sender, 1)
        await sender.close()

    run(main)


def test_big_frames_arrive_whole_whatever_they_hold(way: Way) -> None:
    async def main() -> None:
        sender, receiver = way.sender(), way.receiver()
        frames = {1: bytes(range(256)) * (20 * 4096), 2: b"", 3: b"\x00" * 7}
        for sequence, frame in frames.items():
            await sender.send(sequence, frame)
        for sequence, frame in frames.items():
            received = await receive(receiver, sequence)
            assert received == frame, f"frame {sequence} differs"
        await asyncio.to_thread(receiver.close)
        await sender.close()

    run(main)


def test_a_frame_out_of_order_is_refused(way: Way) -> None:
    async def main() -> None:
        sender = way.sender()
        await sender.send(3, b"")
        with pytest.raises(ChannelError, match="frame 5 was to be sent out of order; expected 4"):
            await sender.send(5, b"")
        await sender.close()

    run(main)


def test_a_receiver_is_not_given_again_what_it_acknowledged(way: Way) -> None:
    async def main() -> None:
        sender, receiver = way.sender(), way.receiver()
        await sender.send(1, b"one")
        assert await receive(receiver, 1) == b"one"
        await asyncio.to_thread(receiver.acknowledge, 1)
        with pytest.raises(ChannelError, match="frame 1 was acknowledged before"):
            await receive(receiver, 1)
        await asyncio.to_thread(receiver.close)
        await sender.close()

    run(main)


def test_a_sender_knows_the_receiver_that_has_asked_it_and_no_one_that_asked_another_before(way: Way) -> None:
    async def asked_by(sender: Sender, receiver_id: str) -> None:
        while await sender.receiver() != receiver_id:
            await asyncio.sleep(0.01)

    async def main() -> None:
        sender, receiver = way.sender(), way.receiver("first")
        await asyncio.sleep(0.2)
        assert await sender.receiver() is None, "it is there, but has not asked"
        assert await receive(receiver, 1, 0.5) is None
        await asked_by(sender, "first")
        await asyncio.to_thread(receiver.close)
        await sender.close()
        again = way.sender()
        await asyncio.sleep(0.2)
        assert await again.receiver() is None
        second = way.receiver("second")
        assert await receive(second, 1, 0.5) is None
        await asked_by(again, "second")
        await asyncio.to_thread(second.close)
        await again.close()

    run(main)
