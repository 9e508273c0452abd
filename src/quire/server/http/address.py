"""The address that a server listens on; this module imports little, so that a mistake is reported at once."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from pathlib import Path

from quire.errors import ConfigError
from quire.server.settings import ServerConfig


def bind_server(config: ServerConfig) -> socket.socket:
    """Return the bound socket of a server, after a check of its certificate; see `bind`.

    Raises:
        ConfigError: the address is not available, or the certificate and its key cannot be used.
    """
    tls_context(config.ssl_certfile, config.ssl_keyfile)
    return bind(config.host, config.port) if config.uds is None else bind_unix(config.uds)


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
    """Return a Unix domain socket that is bound but does not listen yet; a file that no server uses is replaced."""
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


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """Return the context of encrypted connections; None without a certificate."""
    if certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, OpenSSL would prompt for it on the terminal.
        context.load_cert_chain(certfile, keyfile, password="")
    except OSError as error:  # `ssl.SSLError` is one
        reason = error.strerror or str(error)
        key = "" if keyfile is None else f" with ssl_keyfile {keyfile!r}"
        raise ConfigError(f"ssl_certfile {certfile!r}{key} cannot be used: {reason}", field="ssl_certfile") from error
    return context


def url_of(listener: socket.socket, scheme: str) -> str:
    """Return the address of a bound socket as a URL."""
    if isinstance(path := listener.getsockname(), str):
        return f"unix:{path}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
