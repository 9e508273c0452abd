"""Checks of the options of stores (disk, remote) and KV transfer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.config.checks import check_positive, check_text
from quire.config.kv_transfer import read_kv_transfer
from quire.config.store_url import client_url
from quire.errors import ConfigError

CACHES = ("prefix_cache_dir", "prefix_cache_url")


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
