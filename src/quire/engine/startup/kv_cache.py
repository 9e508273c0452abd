"""Builds the KV cache of an engine: memory and its record, stores outside memory and their prefetcher, KV events.

What a function opens is closed by the stack `parts`, in reverse order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch

from quire.config import CacheConfig, EngineConfig, ResolvedConfig
from quire.distributed.kv_events.publisher import KVEventPublisher
from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.folder import StoreFolder
from quire.distributed.kvstore.prefix_store import PrefixStore
from quire.distributed.kvstore.record import IDENTITY_BYTES
from quire.distributed.kvstore.remote_store import RemoteSettings, RemoteStore
from quire.distributed.pipeline import PipelineGroup
from quire.distributed.ranks import Ranks
from quire.engine.adapters import AdapterRegistry
from quire.engine.kv.disk_prefetch import DiskPrefetcher
from quire.engine.kv.handover import HandOver
from quire.engine.kv.kv_events import KVEventSource
from quire.engine.kv.source_loads import PlannedSource, SourceLoads
from quire.errors import ConfigError
from quire.memory.capacity.sizing import ArenaSizing, arena_bytes, least_host_bytes
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.recording.recorder import MemoryRecorder
from quire.memory.recording.settings import MemorySettings
from quire.memory.specs import KVCacheSpec
from quire.models.capacity.pool_sizing import num_kept_free, num_slabs
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.fingerprint import fingerprint
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.spec import ModelSpec
from quire.models.specs.stage_spec import StageSpec
from quire.ops.interface.weight_formats import FORMS
from quire.platform.bounded.files import user_path
from quire.scheduling.command_log import CommandStream
from quire.sequences.sequence import Sequence as TokenSequence

logger = logging.getLogger(__name__)


def open_memory(
    resolved: ResolvedConfig,
    sizing: ArenaSizing,
    parts: ExitStack,
    disk: DiskBlocks | None = None,
    record: str | None = None,
) -> KVCacheManager:
    """Return the memory manager, with the bytes of `num_blocks` blocks of every token group and the null blocks.

    Its commands are recorded in the file `record`, if that is a path.
    """
    least = least_host_bytes(sizing.specs)
    if 0 < resolved.swap_space < least:
        raise ConfigError(
            f"swap_space ({resolved.swap_space:,}) must be 0, or at least {least:,}: a block of every cache group",
            field="swap_space",
        )
    settings = MemorySettings(
        specs=sizing.specs,
        num_bytes=arena_bytes(sizing.specs, resolved.num_blocks),
        watermark=num_kept_free(sizing, resolved.watermark),
        enable_prefix_caching=resolved.enable_prefix_caching,
        eviction=resolved.eviction_policy,
        pin_limit=num_slabs(sizing, resolved.pin_limit),
        retention_limit=num_slabs(sizing, resolved.retention_limit),
        host_bytes=resolved.host_bytes,
        has_disk=disk is not None,
        snapshot_interval=resolved.state_snapshot_interval,
    )
    manager = settings.build(os.urandom(32) if disk is None else disk.key)
    if record is not None:
        parts.enter_context(_recording(manager, settings, record))
    return manager


@contextmanager
def _recording(manager: KVCacheManager, settings: MemorySettings, path: str) -> Iterator[None]:
    """Record the commands of a memory manager in a new file, which is deleted if the engine does not start."""
    try:
        log = open(path, "x", encoding="utf-8", newline="\n")  # noqa: SIM115  the recorder closes it
    except OSError as error:
        raise ConfigError(
            f"record_memory must be a file that can be made anew: {path}: {error.strerror}", field="record_memory"
        ) from error
    recorder = MemoryRecorder(manager, settings, log)
    logger.info("Memory commands are recorded in %s", path)
    try:
        yield
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
    finally:
        recorder.close()


def open_stores(
    config: EngineConfig,
    models: Sequence[tuple[Checkpoint, ModelSpec | HostedSpec]],
    resolved: ResolvedConfig,
    groups: Sequence[KVCacheSpec],
    dtype: torch.dtype,
    parts: ExitStack,
    ranks: Ranks | None = None,
) -> DiskBlocks | None:
    """Open the prefix caches outside memory; None without any."""
    cache = config.cache
    if not cache.has_stores:
        return None
    block_bytes = [group.bytes_per_block for group in groups]
    folder, disk, remote, transfer = None, None, None, cache.transfer
    try:
        if cache.prefix_cache_dir is not None:
            folder = StoreFolder(user_path(cache.prefix_cache_dir) / _part_of(ranks))
            parts.callback(folder.close)
        identity = _identity(models, resolved, groups, dtype, None if folder is None else folder.path, _part_of(ranks))
        if folder is not None:
            disk = PrefixStore(folder, identity, cache.prefix_cache_disk_bytes, max(block_bytes))
            parts.callback(disk.close)
    except OSError as error:
        raise ConfigError(
            f"prefix_cache_dir {cache.prefix_cache_dir} cannot be used: {error}", field="prefix_cache_dir"
        ) from error
    if cache.prefix_cache_url is not None:
        settings = RemoteSettings(cache.prefix_cache_url, cache.prefix_cache_timeout_s, cache.prefix_cache_ttl_s)
        remote = RemoteStore(settings, identity, max(block_bytes))
        parts.callback(remote.close)
    # Engines of several hosts must compute the same digests, so their key cannot be one folder's secret.
    is_alone = folder is not None and remote is None and transfer is None
    key = folder.key if folder is not None and is_alone else shared_key(identity)
    is_producer = transfer is not None and transfer.is_producer
    exports = ExportTable(transfer.kv_buffer_size, transfer.ttl_s) if transfer is not None and is_producer else None
    blocks = DiskBlocks(key, identity, block_bytes, disk=disk, remote=remote, exports=exports)
    parts.callback(blocks.close)
    return blocks


def digest_of_files(files: Checkpoint, cache: CacheConfig, ranks: Ranks | None) -> str:
    """Return a digest of files on which blocks depend, besides the model's; a prefix cache on disk remembers it."""
    folder = None if cache.prefix_cache_dir is None else user_path(cache.prefix_cache_dir) / _part_of(ranks)
    return fingerprint(files, (), None if folder is None else folder / "encoder_weights.json").hex()


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
    models: Sequence[tuple[Checkpoint, ModelSpec | HostedSpec]],
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
    parts: ExitStack,
    ranks: Ranks | None = None,
    commands: CommandStream | None = None,
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
        parts.callback(hand_over.close)
    if disk.remote is not None or hand_over is not None:
        find = partial(_sources_of, hand_over, disk.remote, cache.prefix_cache_timeout_s)
        sources = SourceLoads(
            memory.archive,
            disk,
            find,
            partial(_chain_at_sources, memory),
            block_bytes=block_bytes,
            block_size=resolved.block_size,
        )
    prefetch = DiskPrefetcher(
        memory.archive,
        disk,
        block_size=resolved.block_size,
        block_bytes=block_bytes,
        step_tokens=resolved.max_num_batched_tokens,
        sources=sources,
        ranks=ranks,
        commands=commands,
    )
    return prefetch, hand_over


def _chain_at_sources(memory: KVCacheManager, sequence: TokenSequence) -> TokenChain:
    """Return the chain of a sequence's blocks at other engines and stores."""
    request = sequence.request
    if request.source_namespace is None:
        return sequence.chain
    spans = [media.span for media in request.media]
    return memory.chain(list(sequence.tokens), request.source_namespace, spans)


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


def open_publisher(config: EngineConfig, parts: ExitStack) -> KVEventPublisher | None:
    """Return the publisher of KV events; None if the configuration has none.

    It is opened before the stores, whose last writes are events.
    """
    if config.cache.kv_events is None:
        return None
    publisher = KVEventPublisher(config.cache.kv_events)
    parts.callback(publisher.close)
    logger.info("KV events: published at %s, replayed at %s", publisher.endpoint, publisher.replay_endpoint)
    return publisher


def make_kv_events(
    config: EngineConfig,
    publisher: KVEventPublisher | None,
    memory: KVCacheManager,
    adapters: AdapterRegistry | None,
    disk: DiskBlocks | None,
) -> KVEventSource | None:
    """Return the publication of the events of memory and disk; None without a publisher."""
    if publisher is None or config.cache.kv_events is None:
        return None

    def adapter_name(digest: str) -> str:
        loaded = () if adapters is None else adapters.loaded
        return next((adapter.name for adapter in loaded if adapter.digest == digest), digest)

    store = None if disk is None else disk.disk
    return KVEventSource(memory, publisher, adapter_name, config.cache.kv_events.form, store)
