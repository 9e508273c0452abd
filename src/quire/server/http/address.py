"""The address that a server listens on; this module imports little, so that a mistake is reported at once."""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Final

from quire.errors import ConfigError
from quire.platform.bounded.files import read_file
from quire.server.settings import ServerConfig

MAX_PEM_BYTES: Final = 1 << 20
CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
PRIVATE_KEY: Final = b"PRIVATE KEY-----"


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
        hint = "; choose another port, 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        why = f"{error.strerror or error}{hint}"
        raise ConfigError(f"cannot listen on {host} port {port}: {why}", field="port") from error
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
    certificate = _read_pem("ssl_certfile", certfile)
    key = certificate if keyfile is None else _read_pem("ssl_keyfile", keyfile)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, OpenSSL would prompt for it on the terminal.
        context.load_cert_chain(certfile, keyfile, password="")
    except ssl.SSLError as error:
        field, why = _fault_of_pem(certificate, key, error, has_keyfile=keyfile is not None)
        file = keyfile if field == "ssl_keyfile" and keyfile is not None else certfile
        raise ConfigError(f"{field} {file!r} cannot be used: {why}", field=field) from error
    return context


def _read_pem(field: str, path: str) -> bytes:
    try:
        return read_file(Path(path), MAX_PEM_BYTES)
    except OSError as error:
        raise ConfigError(f"{field} {path!r} cannot be read: {error.strerror}", field=field) from error


def _fault_of_pem(certificate: bytes, key: bytes, error: ssl.SSLError, *, has_keyfile: bool) -> tuple[str, str]:
    """Return the option whose file OpenSSL refuses, and why, which OpenSSL calls "PEM lib" for most reasons."""
    of_key = "ssl_keyfile" if has_keyfile else "ssl_certfile"
    if CERTIFICATE not in certificate:
        return "ssl_certfile", f"it is no certificate in PEM, which has a line {CERTIFICATE.decode()!r}"
    if PRIVATE_KEY not in key:
        if not has_keyfile:
            return of_key, "it has no private key: name its file with ssl_keyfile"
        return of_key, "it is no private key in PEM, which has a line like '-----BEGIN PRIVATE KEY-----'"
    if b"ENCRYPTED" in key:
        return of_key, "the private key is encrypted: decrypt it, by openssl pkey -in FILE -out NEW_FILE"
    if error.reason == "KEY_VALUES_MISMATCH":
        return of_key, "the private key is not the key of the certificate"
    if error.reason:
        return "ssl_certfile", f"OpenSSL refuses it: {error.reason.replace('_', ' ').lower()}"
    return "ssl_certfile", "the certificate or its key is damaged"


def url_of(listener: socket.socket, scheme: str) -> str:
    """Return the address of a bound socket as a URL."""
    if isinstance(path := listener.getsockname(), str):
        return f"unix:{path}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
