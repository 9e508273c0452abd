"""The address that a server listens on, without what serves it: a mistake shows before anything large is imported."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

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


def bind_unix(path: str) -> socket.socket:
    """Return a Unix domain socket that is bound but does not listen yet; a file that no server uses is replaced.

    Raises:
        ConfigError: another server listens there, the file is no socket, or the system has no such sockets.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("uds needs Unix domain sockets, which this system lacks", field="uds")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(ConnectionRefusedError):
                probe.connect(path)
                raise OSError("another server listens there")
            Path(path).unlink()
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on uds {path!r}: {error.strerror or error}", field="uds") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address of a bound socket as a URL."""
    if isinstance(path := listener.getsockname(), str):
        return f"unix:{path}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
