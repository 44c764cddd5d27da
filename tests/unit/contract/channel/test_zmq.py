from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest
import zmq

from contract.channel.build import open_receiver, open_sender
from contract.channel.zmq import ZmqReceiver, ZmqSender
from contract.errors import ChannelError, ConfigError
from contract.layout import RunFolder
from contract.sections import ZmqChannelConfig


def test_a_port_in_use_is_named_with_what_to_set() -> None:
    async def main(port: int) -> None:
        ZmqSender("127.0.0.1", port)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            ChannelError, match=rf"be bound to '127\.0\.0\.1', channel\.port = {port}: Address already"
        ):
            asyncio.run(main(port))


def test_a_channel_without_a_port_is_refused_at_both_ends(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"channel\.port is not set"):
        open_sender(ZmqChannelConfig(), RunFolder(tmp_path))
    with pytest.raises(ConfigError, match=r"channel\.port is not set"):
        open_receiver(ZmqChannelConfig(), RunFolder(tmp_path), "trainer")


def test_the_orchestrator_binds_one_address_and_the_trainer_connects_to_another(
    free_port: int, tmp_path: Path
) -> None:
    config = ZmqChannelConfig(host="127.0.0.2", bind="0.0.0.0", port=free_port)

    async def main() -> None:
        sender = open_sender(config, RunFolder(tmp_path))
        receiver = open_receiver(config, RunFolder(tmp_path), "trainer")
        try:
            await sender.send(1, b"one")
            assert await asyncio.to_thread(receiver.receive, 1, 10.0) == b"one"
            for address in ("127.0.0.2", "127.0.0.3"):
                socket.create_connection((address, free_port), 5).close()
        finally:
            await asyncio.to_thread(receiver.close)
            await sender.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(
        ChannelError, match=r"'no\.such\.host\.invalid' cannot be reached: .* set channel\.host to"
    ):
        ZmqReceiver("no.such.host.invalid", 5555, "trainer")


def test_messages_that_are_none_of_a_trainer_change_nothing(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        sender, receiver = ZmqSender("localhost", free_port), ZmqReceiver("localhost", free_port, "trainer")
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.connect(f"tcp://127.0.0.1:{free_port}")
            for parts in (
                [b"hello"],
                [b"ack", b"999", b"t"],
                [b"ack", b"x" * 24],
                [b"other", b"x" * 24, b"t"],
            ):
                stranger.send_multipart(parts)
        await sender.send(1, b"one")
        assert await asyncio.to_thread(receiver.receive, 1, 10.0) == b"one"
        while sum("none of a trainer's" in record.message for record in caplog.records) < 4:
            await asyncio.sleep(0.01)
        assert await sender.acknowledged() == 0
        await asyncio.to_thread(receiver.close)
        await sender.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_receiver_that_leaves_is_noticed_in_the_log(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        sender, receiver = ZmqSender("127.0.0.1", free_port), ZmqReceiver("127.0.0.1", free_port, "trainer")
        await sender.send(1, b"one")
        assert await asyncio.to_thread(receiver.receive, 1, 10.0) == b"one"
        await asyncio.to_thread(receiver.close)
        while "a trainer has left the channel" not in caplog.text:
            await asyncio.sleep(0.01)
        await sender.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert "a trainer has connected to the channel" in caplog.text


def test_a_silent_orchestrator_is_noticed_in_the_log_and_so_is_its_return(
    free_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contract.channel.zmq._SILENCE_SECONDS", 0.2)
    caplog.set_level(logging.INFO)

    async def main() -> None:
        receiver = ZmqReceiver("127.0.0.1", free_port, "trainer")
        assert await asyncio.to_thread(receiver.receive, 1, 0.4) is None
        assert "still waiting for frame 1" in caplog.text
        sender = ZmqSender("127.0.0.1", free_port)
        await sender.send(1, b"one")
        assert await asyncio.to_thread(receiver.receive, 1, 10.0) == b"one"
        assert "answers again" in caplog.text
        await asyncio.to_thread(receiver.close)
        await sender.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
