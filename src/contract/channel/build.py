"""The two ends of the channel that the configuration names."""

from __future__ import annotations

from contract.channel.base import Receiver, Sender
from contract.errors import ConfigError
from contract.layout import RunFolder
from contract.sections import ChannelConfig, FilesystemChannelConfig, ZmqChannelConfig


def open_sender(config: ChannelConfig, folder: RunFolder) -> Sender:
    """The orchestrator's end; called inside a running event loop.

    Raises:
        ChannelError: the folder cannot be written, or the address cannot be bound.
        ConfigError: a ZMQ channel without a port.
    """
    # Only here: neither kind needs the libraries of the other.
    match config:
        case FilesystemChannelConfig():
            from contract.channel.filesystem import FilesystemSender

            return FilesystemSender(folder.channel)
        case ZmqChannelConfig():
            from contract.channel.zmq import ZmqSender

            return ZmqSender(config.bound, _port(config))


def open_receiver(config: ChannelConfig, folder: RunFolder, receiver_id: str) -> Receiver:
    """The trainer's end, on its first rank.

    Args:
        receiver_id: under which the sender knows it; no other receiver may ever have the same.

    Raises:
        ChannelError: the folder cannot be written, or there is no such host.
        ConfigError: a ZMQ channel without a port.
    """
    match config:
        case FilesystemChannelConfig():
            from contract.channel.filesystem import FilesystemReceiver

            return FilesystemReceiver(folder.channel, receiver_id)
        case ZmqChannelConfig():
            from contract.channel.zmq import ZmqReceiver

            return ZmqReceiver(config.host, _port(config), receiver_id)


def _port(config: ZmqChannelConfig) -> int:
    if config.port is None:
        raise ConfigError(
            "channel.port is not set: a process that is started alone cannot know the port of the other; set "
            "it to the same free port for both (`rl` finds one by itself)"
        )
    return config.port
