"""Opens the publication of KV events of an engine."""

from __future__ import annotations

import logging

from quire.config import EngineConfig
from quire.distributed.kv_events.publisher import KVEventPublisher
from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.engine.adapters import AdapterRegistry
from quire.engine.kv.kv_events import KVEventSource
from quire.memory.manager import KVCacheManager

logger = logging.getLogger(__name__)


def open_kv_events(
    config: EngineConfig, memory: KVCacheManager, adapters: AdapterRegistry | None, disk: DiskBlocks | None
) -> KVEventSource | None:
    """Return the publication of an engine's KV events; None if the configuration has none."""
    options = config.cache.kv_events
    if options is None:
        return None

    def adapter_name(digest: str) -> str:
        loaded = () if adapters is None else adapters.loaded
        return next((adapter.name for adapter in loaded if adapter.digest == digest), digest)

    publisher = KVEventPublisher(options)
    logger.info("KV events: published at %s, replayed at %s", publisher.endpoint, publisher.replay_endpoint)
    store = None if disk is None else disk.disk
    return KVEventSource(memory, publisher, adapter_name, options.form, store)
