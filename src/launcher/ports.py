"""Free ports, and the addresses of servers that this machine starts."""

from __future__ import annotations

import errno
import socket

from contract.errors import ConfigError


def free_port(host: str) -> int:
    """A port at `host` that nobody listens on now.

    Raises:
        ConfigError: `host` is no address of this machine.
    """
    return _bind(host, 0, "")


def check_port(host: str, port: int, key: str) -> None:
    """Refuse a port that cannot be bound.

    Args:
        key: the setting that names it.

    Raises:
        ConfigError: somebody listens on it, or this user may not.
    """
    _bind(host, port, key)


def url_of(host: str, port: int) -> str:
    """Address at which this machine reaches a server that is bound to `host`."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"


def _bind(host: str, port: int, key: str) -> int:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # A server that ended a moment ago leaves connections behind, which do not keep a new one away.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[1]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{key} = {port} is in use at {host}; choose another one, or remove it to take a free one"
            ) from error
        where = f"port {port} at {host!r}" if port else f"{host!r}"
        raise ConfigError(f"{key or 'host'}: {where} cannot be bound: {error.strerror or error}") from error
