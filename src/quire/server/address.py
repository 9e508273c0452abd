"""The address that a server listens on, without what serves it: a mistake shows before anything large is imported."""

from __future__ import annotations

import socket

from quire.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet: connections are refused until the model is loaded.

    Raises:
        ConfigError: the address is not available.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}", field="port") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address of a bound socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
