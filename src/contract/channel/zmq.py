"""The rollout channel over TCP.

The receiver asks for a frame by its number, and the sender answers as soon as it has it: either end may start
first, end and come back. The receiver repeats its question, so nothing that a broken connection swallowed
stays lost; the sender answers each question once a connection.

    receiver (DEALER): ASK  question, sequence, acknowledged; id | ACK 0, sequence, sequence; id
    sender (ROUTER):   FRAME question, content | WAIT question | GONE question
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from contract.channel.rules import check_order, gone
from contract.errors import ChannelError

logger = logging.getLogger(__name__)

_ASK, _ACK = b"ask", b"ack"
_FRAME, _WAIT, _GONE = b"frame", b"wait", b"gone"
_QUESTION = struct.Struct("!QQQ")
_ANSWER = struct.Struct("!Q")

_ASK_AGAIN_SECONDS = 1.0
_CONNECT_AGAIN_SECONDS = 0.1
_SILENCE_SECONDS = 10.0
"""A receiver that waits says so when it has heard nothing for so long."""
_HEARTBEAT_MS = 5_000
# A heartbeat cannot overtake a frame: it must allow for the slowest one.
_HEARTBEAT_TIMEOUT_MS = 120_000
_LAST_WORD_MS = 1_000
"""A receiver that leaves waits so long until its last acknowledgement is out."""


class ZmqSender:
    """See `contract.channel.base.Sender`. Made inside a running event loop.

    Raises:
        ChannelError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        self._frames: dict[int, bytes] = {}
        self._last: int | None = None
        self._acknowledged = 0
        self._receiver: str | None = None
        self._asked: dict[bytes, tuple[int, int]] = {}
        """Open question (number, sequence) of each connection."""
        self._answered: dict[bytes, int] = {}
        """Latest question of each connection that has had its frame."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        _set_up(self._socket)
        # Without it, what is sent to a receiver that has just left would vanish as if it were sent.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        try:
            self._socket.bind(_url(host, port, "bound"))
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ChannelError(
                f"the channel cannot be bound to {host!r}, channel.port = {port}: {error.strerror}; set "
                f"channel.port to a free port (or remove it, and `rl` finds one), and channel.bind (or "
                f"channel.host, if that is not set) to an address of the orchestrator's machine"
            ) from error
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._serve()), loop.create_task(self._watch(f"{host}:{port}"))]

    async def send(self, sequence: int, frame: bytes) -> None:
        """See `Sender`."""
        self._raise_if_failed()
        check_order(self._last, sequence)
        self._frames[sequence], self._last = frame, sequence
        for peer, (question, wanted) in list(self._asked.items()):
            if wanted == sequence:
                await self._answer(peer, question, wanted)

    async def acknowledged(self) -> int:
        """See `Sender`."""
        self._raise_if_failed()
        return self._acknowledged

    async def receiver(self) -> str | None:
        """See `Sender`."""
        self._raise_if_failed()
        return self._receiver

    async def close(self) -> None:
        """See `Sender`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close_sockets()

    async def _serve(self) -> None:
        while True:
            peer, *parts = await self._socket.recv_multipart()
            if len(parts) != 3 or parts[0] not in (_ASK, _ACK) or len(parts[1]) != _QUESTION.size:
                logger.warning("a message that is none of a trainer's came over the channel; ignored")
                continue
            question, sequence, acknowledged = _QUESTION.unpack(parts[1])
            self._take_acknowledgement(acknowledged)
            if parts[0] == _ASK:
                self._receiver = parts[2].decode(errors="replace")
                await self._answer(peer, question, sequence)

    def _take_acknowledgement(self, sequence: int) -> None:
        for done in [number for number in self._frames if number <= sequence]:
            del self._frames[done]
        self._acknowledged = max(self._acknowledged, sequence)

    async def _answer(self, peer: bytes, question: int, sequence: int) -> None:
        number = _ANSWER.pack(question)
        if self._answered.get(peer) == question:
            # The connection delivers, so the frame is on its way.
            parts = [peer, _WAIT, number]
        elif sequence in self._frames:
            self._asked.pop(peer, None)
            self._answered[peer] = question
            parts = [peer, _FRAME, number, self._frames[sequence]]
        elif sequence <= self._acknowledged:
            parts = [peer, _GONE, number]
        else:
            self._asked[peer] = (question, sequence)
            parts = [peer, _WAIT, number]
        try:
            # Copied: pyzmq would keep a thread to watch over memory that it only borrows.
            await self._socket.send_multipart(parts)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # It has left; when it comes back it asks again, as another peer.
            self._asked.pop(peer, None)
            self._answered.pop(peer, None)

    async def _watch(self, address: str) -> None:
        """Tell the log who comes and goes."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_ACCEPTED:
                logger.info("a trainer has connected to the channel at %s", address)
            elif event == zmq.EVENT_DISCONNECTED:
                logger.info("a trainer has left the channel at %s, or does not answer any more", address)

    def _raise_if_failed(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise ChannelError(f"the channel to the trainer has failed: {error}") from error

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


class ZmqReceiver:
    """See `contract.channel.base.Receiver`, and `contract.channel.build.open_receiver`.

    Raises:
        ChannelError: there is no such host.
    """

    def __init__(self, host: str, port: int, receiver_id: str) -> None:
        self._address = f"{host}:{port}"
        self._id = receiver_id.encode()
        url = _url(host, port, "reached")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_up(self._socket)
        # Questions to a sender that is not there would pile up, and it would answer each.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(url)
        self._question = 0
        self._wanted: int | None = None
        self._acknowledged = 0
        self._is_told = True
        self._ask_at = 0.0
        self._heard_at = time.monotonic()
        self._is_silent = False

    def receive(self, sequence: int, timeout_seconds: float) -> bytes | None:
        """See `Receiver`."""
        if sequence <= self._acknowledged:
            raise gone(sequence)
        now = time.monotonic()
        deadline = now + timeout_seconds
        if sequence != self._wanted:
            self._question, self._wanted, self._ask_at, self._heard_at = (
                self._question + 1,
                sequence,
                now,
                now,
            )
        while True:
            if now >= self._ask_at:
                was_sent = self._say(_ASK, self._question, sequence)
                self._ask_at = now + (_ASK_AGAIN_SECONDS if was_sent else _CONNECT_AGAIN_SECONDS)
            self._mind_silence(now)
            wait_seconds = max(0.0, min(deadline, self._ask_at) - now)
            # Rounded up: a poll of 0 ms would spin.
            if self._socket.poll(int(wait_seconds * 1000) + (wait_seconds > 0)):
                frame = self._take(sequence)
                if frame is not None:
                    return frame
            now = time.monotonic()
            if now >= deadline:
                return None

    def acknowledge(self, sequence: int) -> None:
        """See `Receiver`."""
        self._acknowledged = max(self._acknowledged, sequence)
        self._is_told = self._say(_ACK, 0, sequence)

    def close(self) -> None:
        """See `Receiver`."""
        if not self._is_told and self._socket.poll(_LAST_WORD_MS, zmq.POLLOUT):
            self._say(_ACK, 0, self._acknowledged)
        # The last acknowledgement may still be on its way out: this process ends right after it.
        self._socket.close(linger=_LAST_WORD_MS)
        self._context.term()

    def _take(self, sequence: int) -> bytes | None:
        kind, number, *content = self._socket.recv_multipart()
        if self._is_silent:
            logger.info("the orchestrator at %s answers again", self._address)
        self._heard_at, self._is_silent = time.monotonic(), False
        if _ANSWER.unpack(number)[0] != self._question or kind == _WAIT:
            return None
        if kind == _GONE:
            raise gone(sequence)
        # Whoever asks for it again gets it again.
        self._wanted = None
        return content[0]

    def _say(self, kind: bytes, question: int, sequence: int) -> bool:
        """Whether the sender is there to hear it."""
        try:
            self._socket.send_multipart(
                [kind, _QUESTION.pack(question, sequence, self._acknowledged), self._id], zmq.NOBLOCK
            )
        except zmq.Again:
            return False
        self._is_told = True
        return True

    def _mind_silence(self, now: float) -> None:
        if not self._is_silent and now - self._heard_at > _SILENCE_SECONDS:
            self._is_silent = True
            logger.warning(
                "no word from the orchestrator at %s for %.0f s; still waiting for frame %s",
                self._address, now - self._heard_at, self._wanted,
            )  # fmt: skip


def _set_up(channel: zmq.Socket | zmq.asyncio.Socket) -> None:
    channel.setsockopt(zmq.LINGER, 0)
    channel.setsockopt(zmq.IPV6, 1)
    channel.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    channel.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def _url(host: str, port: int, verb: str) -> str:
    """ZMQ binds addresses only, no names."""
    key = "bind" if verb == "bound" else "host"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ChannelError(
            f"the channel's address {host!r} cannot be {verb}: {error.strerror}; set channel.{key} to the "
            f"name or an address of the orchestrator's machine"
        ) from error
    return f"tcp://[{address[0]}]:{port}" if family == socket.AF_INET6 else f"tcp://{address[0]}:{port}"
