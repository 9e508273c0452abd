"""Builds the prefix cache on disk, and its prefetcher, from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quire.config import EngineConfig, ResolvedConfig
from quire.engine.kv.disk_prefetch import DiskPrefetcher
from quire.errors import ConfigError
from quire.kvstore.disk_blocks import DiskBlocks
from quire.kvstore.folder import StoreFolder
from quire.kvstore.prefix_store import PrefixStore
from quire.kvstore.record import IDENTITY_BYTES
from quire.memory.manager import KVCacheManager
from quire.memory.specs import KVCacheSpec
from quire.models.checkpoint import Checkpoint
from quire.models.fingerprint import fingerprint
from quire.models.spec import ModelSpec


def open_disk(
    config: EngineConfig,
    models: Sequence[tuple[Checkpoint, ModelSpec]],
    resolved: ResolvedConfig,
    groups: Sequence[KVCacheSpec],
    dtype: torch.dtype,
) -> DiskBlocks:
    """Open the prefix cache on disk.

    Args:
        config: configuration with a `prefix_cache_dir`.
        models: checkpoint and specification of the model, and those of a draft model after them.
        resolved: the resolved configuration.
        groups: the cache groups.
        dtype: dtype of the weights.

    Raises:
        ConfigError: the folder cannot be used, `prefix_cache_disk_bytes` is too small, or LMDB is not installed.
    """
    cache = config.cache
    assert cache.prefix_cache_dir is not None
    block_bytes = [group.bytes_per_block for group in groups]
    folder = StoreFolder(Path(cache.prefix_cache_dir).expanduser())
    try:
        # Other kernels, or another device, round differently, so their KV must not be hit.
        layout = [
            str(dtype),
            resolved.kv_cache_dtype,
            resolved.device,
            resolved.kernels,
            str(resolved.block_size),
            *map(repr, groups),
        ]
        layout += filter(None, [resolved.quantization])
        # The longest context that is served decides about them.
        has_long_factors = [spec.has_long_factors for _, spec in models]
        layout += [str(has_long_factors)] * any(has_long_factors)
        model, *others = (checkpoint for checkpoint, _ in models)
        layout += [fingerprint(each, (), folder.path / "draft_weights.json").hex() for each in others]
        identity = fingerprint(model, layout, folder.path / "weights.json", IDENTITY_BYTES)
        store = PrefixStore(folder, identity, cache.prefix_cache_disk_bytes, max(block_bytes))
    except OSError as error:
        folder.close()
        raise ConfigError(
            f"prefix_cache_dir {cache.prefix_cache_dir} cannot be used: {error}", field="prefix_cache_dir"
        ) from error
    except ConfigError:
        folder.close()
        raise
    return DiskBlocks(store, block_bytes)


def make_disk_prefetcher(
    memory: KVCacheManager, disk: DiskBlocks, resolved: ResolvedConfig, groups: Sequence[KVCacheSpec]
) -> DiskPrefetcher:
    """Return the prefetcher of blocks on disk."""
    assert memory.archive is not None, "the memory was made without a disk"
    return DiskPrefetcher(
        memory.archive,
        disk,
        block_size=resolved.block_size,
        block_bytes=[group.bytes_per_block for group in groups],
        step_tokens=resolved.max_num_batched_tokens,
    )
