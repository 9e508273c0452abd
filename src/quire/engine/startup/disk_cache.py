"""Builds the prefix caches outside memory, on disk and remote, and their prefetcher, from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch

from quire.config import CacheConfig, EngineConfig, ResolvedConfig
from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.folder import StoreFolder
from quire.distributed.kvstore.prefix_store import PrefixStore
from quire.distributed.kvstore.record import IDENTITY_BYTES
from quire.distributed.kvstore.remote_store import RemoteSettings, RemoteStore
from quire.distributed.pipeline import PipelineGroup
from quire.distributed.ranks import Ranks
from quire.engine.kv.disk_prefetch import DiskPrefetcher
from quire.engine.kv.handover import HandOver
from quire.engine.kv.source_loads import PlannedSource, SourceLoads
from quire.errors import ConfigError
from quire.memory.manager import KVCacheManager
from quire.memory.specs import KVCacheSpec
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.fingerprint import fingerprint
from quire.models.specs.spec import ModelSpec
from quire.models.specs.stage_spec import StageSpec
from quire.ops.interface.weight_formats import FORMS
from quire.sequences.sequence import Sequence as TokenSequence


def open_stores(
    config: EngineConfig,
    models: Sequence[tuple[Checkpoint, ModelSpec]],
    resolved: ResolvedConfig,
    groups: Sequence[KVCacheSpec],
    dtype: torch.dtype,
    ranks: Ranks | None = None,
) -> DiskBlocks:
    """Open the prefix caches outside memory."""
    cache = config.cache
    block_bytes = [group.bytes_per_block for group in groups]
    with ExitStack() as stack:
        folder = None
        if cache.prefix_cache_dir is not None:
            folder = StoreFolder(Path(cache.prefix_cache_dir).expanduser() / _part_of(ranks))
            stack.callback(folder.close)
        try:
            identity = _identity(
                models, resolved, groups, dtype, None if folder is None else folder.path, _part_of(ranks)
            )
            disk = None
            if folder is not None:
                disk = PrefixStore(folder, identity, cache.prefix_cache_disk_bytes, max(block_bytes))
                stack.callback(disk.close)
        except OSError as error:
            raise ConfigError(
                f"prefix_cache_dir {cache.prefix_cache_dir} cannot be used: {error}", field="prefix_cache_dir"
            ) from error
        remote = None
        if cache.prefix_cache_url is not None:
            settings = RemoteSettings(cache.prefix_cache_url, cache.prefix_cache_timeout_s, cache.prefix_cache_ttl_s)
            remote = RemoteStore(settings, identity, max(block_bytes))
        # Engines of several hosts must compute the same digests, so their key cannot be one folder's secret.
        is_alone = folder is not None and remote is None and cache.transfer is None
        key = folder.key if folder is not None and is_alone else shared_key(identity)
        stack.pop_all()
    transfer = cache.transfer
    is_producer = transfer is not None and transfer.is_producer
    exports = ExportTable(transfer.kv_buffer_size, transfer.ttl_s) if transfer is not None and is_producer else None
    return DiskBlocks(key, identity, block_bytes, disk=disk, remote=remote, exports=exports)


def _part_of(ranks: Ranks | None) -> str:
    """Return a name of a rank's shard of each block; "" for whole blocks."""
    if ranks is None:
        return ""
    if isinstance(ranks.group, PipelineGroup):
        grid = ranks.group.grid
        return f"rank-{ranks.rank}-of-{grid.tensor_size}x{grid.num_stages}"
    return f"rank-{ranks.rank}-of-{ranks.size}"


def shared_key(identity: bytes) -> bytes:
    """Return the digest key shared by all engines that compute the same KV bytes."""
    return blake2b(b"quire: digests of shared blocks", key=identity, digest_size=32).digest()


def _identity(
    models: Sequence[tuple[Checkpoint, ModelSpec]],
    resolved: ResolvedConfig,
    groups: Sequence[KVCacheSpec],
    dtype: torch.dtype,
    folder: Path | None,
    part: str,
) -> bytes:
    """Return the digest of everything that determines the bytes of a block, except its tokens."""
    # Other kernels, or another device, round differently, so their KV must not be hit.
    layout = [
        str(dtype),
        resolved.kv_cache_dtype,
        resolved.device,
        resolved.kernels,
        str(resolved.block_size),
        *map(repr, groups),
    ]
    if resolved.quantization is not None:
        # Another version may round weights, and the activations that they are multiplied with, to other forms.
        layout += [resolved.quantization, *map(repr, FORMS.values())]
    layout += filter(None, [part])
    # Another version may divide the layers of a model among stages in another way.
    layout += [
        f"layers {spec.first}-{spec.first + len(spec.layers)}" for _, spec in models if isinstance(spec, StageSpec)
    ]
    # Whether long-context RoPE factors are used depends on the longest context that is served.
    has_long_factors = [spec.has_long_factors for _, spec in models]
    layout += [str(has_long_factors)] * any(has_long_factors)
    model, *others = (checkpoint for checkpoint, _ in models)
    known = [None if folder is None else folder / name for name in ("weights.json", "draft_weights.json")]
    layout += [fingerprint(each, (), known[1]).hex() for each in others]
    return fingerprint(model, layout, known[0], IDENTITY_BYTES)


def open_prefetch(
    memory: KVCacheManager,
    disk: DiskBlocks | None,
    cache: CacheConfig,
    resolved: ResolvedConfig,
    groups: Sequence[KVCacheSpec],
    stack: ExitStack,
    ranks: Ranks | None = None,
) -> tuple[DiskPrefetcher | None, HandOver | None]:
    """Return the prefetcher of blocks outside memory, and the hand-over of blocks, which is listening."""
    if disk is None:
        return None, None
    assert memory.archive is not None, "the memory was made without a disk"
    if cache.writes_through:
        memory.archive.ended = []
    transfer, hand_over, sources = cache.transfer, None, None
    block_bytes = [group.bytes_per_block for group in groups]
    if transfer is not None:
        hand_over = HandOver(transfer, disk.exports, disk.identity, max(block_bytes))
        stack.callback(hand_over.close)
    if disk.remote is not None or hand_over is not None:
        find = partial(_sources_of, hand_over, disk.remote, cache.prefix_cache_timeout_s)
        sources = SourceLoads(memory.archive, disk, find, block_bytes=block_bytes, block_size=resolved.block_size)
    prefetch = DiskPrefetcher(
        memory.archive,
        disk,
        block_size=resolved.block_size,
        block_bytes=block_bytes,
        step_tokens=resolved.max_num_batched_tokens,
        sources=sources,
        ranks=ranks,
    )
    return prefetch, hand_over


def _sources_of(
    hand_over: HandOver | None, remote: RemoteStore | None, timeout_s: float, sequence: TokenSequence
) -> list[PlannedSource]:
    """Return the sources of a sequence's blocks: the engine that its request names, then the remote store."""
    found: list[PlannedSource] = []
    peer = None if hand_over is None else hand_over.source_of(sequence.request)
    if hand_over is not None and peer is not None:
        must_have = hand_over.config.kv_load_failure_policy == "fail"
        found.append(PlannedSource(peer, hand_over.config.timeout_s, must_have))
    if remote is not None:
        found.append(PlannedSource(remote.pool, timeout_s))
    return found
