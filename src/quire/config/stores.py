"""Checks of the options of stores (disk, remote), of the address of a remote store, and of KV transfer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from quire.config.checks import check_positive, check_text
from quire.config.kv_transfer import read_kv_transfer
from quire.errors import ConfigError

CACHES = ("prefix_cache_dir", "prefix_cache_url")
# Schemes, and those of the client library.
SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}


def put_stores(config: Any) -> None:
    """Check the options of a `CacheConfig` for stores and KV transfer; replace a mapping by its JSON."""
    if isinstance(config.kv_transfer_config, Mapping):
        object.__setattr__(config, "kv_transfer_config", json.dumps(dict(config.kv_transfer_config), default=str))
    read_kv_transfer(config.kv_transfer_config)
    check_text("prefix_cache_url", config.prefix_cache_url, optional=True)
    check_positive("prefix_cache_timeout_s", config.prefix_cache_timeout_s)
    check_positive("prefix_cache_ttl_s", config.prefix_cache_ttl_s, optional=True)
    if config.prefix_cache_url is not None:
        client_url(config.prefix_cache_url)
    for name in (*CACHES, "kv_transfer_config"):
        if getattr(config, name) is not None and not config.enable_prefix_caching:
            raise ConfigError(f"{name} needs enable_prefix_caching, which is off", field=name)
    name = "prefix_cache_write_policy"
    if getattr(config, name) is not None and all(getattr(config, cache) is None for cache in CACHES):
        raise ConfigError(f"{name} needs {' or '.join(CACHES)}", field=name)


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
