"""The address of a remote prefix cache: checked before a connection is made, and shown without its password."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from quire.errors import ConfigError

# Schemes of addresses -> schemes of the client library.
SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}


def client_url(url: str) -> str:
    """Return an address in the form of the client library.

    Raises:
        ConfigError: the address has an unknown scheme, no host, or an invalid port.
    """
    try:
        parts = urlsplit(url)
        has_place = bool(parts.path if parts.scheme == "unix" else parts.hostname) and (parts.port or 1) > 0
    except ValueError as error:
        raise bad_url(url, str(error)) from None
    if parts.scheme not in SCHEMES or not has_place:
        raise bad_url(url, "")
    if parts.scheme != "unix" and parts.path not in ("", "/") and not parts.path[1:].isdigit():
        raise bad_url(url, "the path is the number of a database")
    return SCHEMES[parts.scheme] + url[len(parts.scheme) :]


def shown_url(url: str) -> str:
    """Return an address without its password."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return "an address that cannot be read"
    user = "***@" if parts.username or parts.password else ""
    return urlunsplit(parts._replace(netloc=user + host, query="***" if parts.query else ""))


def bad_url(url: str, reason: str) -> ConfigError:
    """Return the error of a malformed address."""
    allowed = "redis://HOST:PORT/DATABASE (also rediss, valkey, valkeys), or unix:///PATH"
    why = f" ({reason})" if reason else ""
    return ConfigError(f"prefix_cache_url must be {allowed}, got {shown_url(url)!r}{why}", field="prefix_cache_url")
