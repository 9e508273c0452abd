"""Bytes of images that a request names: data URLs, files below a folder, and pages of allowed hosts.

What a server fetches for its clients is how strangers reach its own network. So a URL is fetched only from hosts that
the operator has named; the name is resolved once, every address must be public, and the connection goes to an address
that was checked, whatever the name says a moment later. Redirections are refused.
"""

from __future__ import annotations

import binascii
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.platform.bounded.files import read_file, reason_of

MAX_BYTES: Final = 20 << 20
# The library that divides URLs keeps the last ones in memory.
MAX_URL_CHARS: Final = 1 << 13
FETCH_TIMEOUT_S: Final = 10.0
# Characters of base64 that one call, which holds the interpreter's lock, decodes; a multiple of 4.
PIECE_CHARS: Final = 1 << 20
# Characters in which percent escapes are resolved in one call.
ESCAPED_CHARS: Final = 1 << 16
# Characters in which the head of a data URL ends; matching a long one would take memory for each of its parameters.
MAX_HEAD_CHARS: Final = 256
_DATA_URL: Final = re.compile(r"data:[\w.+/-]*((?:;[\w.=+-]*)*),", re.ASCII | re.IGNORECASE)
_USER_AGENT: Final = "quire"

Resolver = Callable[[str, int], list[str]]


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host.

    Raises:
        OSError: it has none.
    """
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_public(address: str) -> bool:
    """Return whether an address is one of the internet: not private, local, reserved, shared or multicast.

    An IPv6 address that carries one of IPv4 must carry a public one.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
    return found.is_global and not found.is_multicast


_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class ImageSources:
    """Reads the images that requests name; thread-safe.

    Args:
        domains: hosts of `http` and `https` URLs that may be fetched, without ports; a subdomain is a host of its own.
        folder: folder below which `file` URLs and paths may be read; None for none.
        resolver: returns the addresses of a host.
        is_allowed: tells whether an address may be connected to.
    """

    def __init__(
        self,
        domains: Collection[str] = (),
        folder: Path | None = None,
        resolver: Resolver = resolve,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._domains = frozenset(domain.lower().rstrip(".") for domain in domains)
        self._folder = None if folder is None else folder.resolve()
        self._resolver = resolver
        self._is_allowed = is_allowed
        self._tls = ssl.create_default_context()

    def read(self, field: str, url: str) -> bytes:
        """Return the content of an image.

        Args:
            field: name of the URL, for errors.
            url: a `data`, `file`, `http` or `https` URL.

        Raises:
            InvalidParameter: it is none of them, is malformed, or cannot be read within the limits.
            UnsupportedFeature: this server reads none of its kind, or not from there.
        """
        if url[:5].lower() == "data:":
            return self._decode_url(field, url)
        if len(url) > MAX_URL_CHARS:
            raise InvalidParameter(field, url, f"a data URL, or one of at most {MAX_URL_CHARS} characters")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidParameter(field, url, f"a URL: {error}") from error
        if parts.scheme == "file":
            return self._read_file(field, parts)
        if parts.scheme in ("http", "https"):
            return self._fetch(field, parts, port or (443 if parts.scheme == "https" else 80))
        raise InvalidParameter(field, url, "a data, file, http or https URL")

    def decode(self, field: str, text: str) -> bytes:
        """Return the content of an image in base64; see `read`. Other threads run between its parts."""
        _check_length(field, text)
        pieces = []
        try:
            for start in range(0, len(text), PIECE_CHARS):
                piece = binascii.a2b_base64(text[start : start + PIECE_CHARS], strict_mode=True)
                if len(piece) * 4 != PIECE_CHARS * 3 and start + PIECE_CHARS < len(text):
                    raise ValueError("padding before the end")
                pieces.append(piece)
        except ValueError as error:
            raise InvalidParameter(field, text, f"an image file in base64: {error}") from error
        return b"".join(pieces)

    def _decode_url(self, field: str, url: str) -> bytes:
        head = _DATA_URL.match(url[:MAX_HEAD_CHARS])
        if head is None:
            raise InvalidParameter(field, url, "a data URL: data:image/png;base64,...")
        if not head[1].lower().endswith(";base64"):
            raise InvalidParameter(field, url, "a data URL in base64")
        text = url[head.end() :]
        _check_length(field, text)
        return self.decode(field, _unescaped(text) if "%" in text else text)

    def _read_file(self, field: str, parts: SplitResult) -> bytes:
        if self._folder is None:
            raise UnsupportedFeature(field, "this server reads no files; --allowed-local-media-path names a folder")
        if parts.netloc not in ("", "localhost"):
            raise InvalidParameter(field, parts.geturl(), "a file URL without a host: file:///...")
        try:
            # `resolve` follows links, so that none leads out of the folder.
            path = Path(unquote(parts.path)).resolve()
            if not path.is_relative_to(self._folder):
                raise UnsupportedFeature(field, "the file is not below --allowed-local-media-path")
            return read_file(path, MAX_BYTES)
        except (OSError, ValueError) as error:
            raise InvalidParameter(field, parts.geturl(), f"a file that can be read: {reason_of(error)}") from error

    def _fetch(self, field: str, parts: SplitResult, port: int) -> bytes:
        host = (parts.hostname or "").rstrip(".")
        if host not in self._domains:
            allowed = "no URLs; --allowed-media-domains names hosts" if not self._domains else "not from this host"
            raise UnsupportedFeature(field, f"this server fetches {allowed}")
        if parts.username is not None or parts.password is not None:
            raise InvalidParameter(field, f"a URL of {host} with a user", "a URL without one")
        deadline = time.monotonic() + FETCH_TIMEOUT_S
        try:
            addresses = self._resolver(host, port)
            if not addresses or not all(map(self._is_allowed, addresses)):
                raise UnsupportedFeature(field, f"{host} has an address that is not public")
            return self._get(field, parts, host, port, addresses[0], deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            is_late = time.monotonic() >= deadline
            why = f"it takes more than {FETCH_TIMEOUT_S:g} s" if is_late else str(error) or type(error).__name__
            raise InvalidParameter(field, f"a URL of {host}", f"an image that can be fetched: {why}") from error

    def _get(self, field: str, parts: SplitResult, host: str, port: int, address: str, deadline: float) -> bytes:
        """Return the body of a page, read from one address until a deadline in seconds of the monotonic clock."""
        sock = socket.create_connection((address, port), timeout=_left(deadline))
        if parts.scheme == "https":
            sock = self._tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        # A timeout of the socket starts again with each byte.
        timer = threading.Timer(_left(deadline), _shut, [sock])
        try:
            timer.start()
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection = http.client.HTTPConnection(host, port)
            connection.sock = sock
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"User-Agent": _USER_AGENT, "Accept": "image/*"})
            with connection.getresponse() as response:
                if response.status != http.client.OK:
                    allowed = "a page with status 200; redirections are not followed"
                    raise InvalidParameter(field, f"status {response.status} of {host}", allowed)
                data = response.read(MAX_BYTES + 1)
                if response.length and len(data) <= MAX_BYTES:
                    raise http.client.IncompleteRead(data, response.length)
            _left(deadline)  # a head that was cut off reads like a whole one
        finally:
            timer.cancel()
            sock.close()
        if len(data) > MAX_BYTES:
            raise InvalidParameter(field, f"more than {MAX_BYTES} bytes of {host}", _within("a page"))
        return data


def _check_length(field: str, text: str) -> None:
    """Refuse a text in base64 that is too long, by an estimate, before anything is made of it."""
    if len(text) * 3 > (MAX_BYTES + 3) * 4:
        raise InvalidParameter(field, f"{len(text)} characters", _within("base64"))


def _unescaped(text: str) -> str:
    """Return a text without percent escapes, part by part: the library makes a string of each escape, at once."""
    parts, start = [], 0
    while start < len(text):
        end = start + ESCAPED_CHARS
        cut = text.rfind("%", end - 2, end)  # of an escape that the part would divide
        end = end if cut < 0 else cut
        parts.append(unquote(text[start:end]))
        start = end
    return "".join(parts)


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _within(what: str) -> str:
    return f"{what} with an image of at most {MAX_BYTES >> 20} MiB"
