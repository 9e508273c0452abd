"""Options of the KV cache and its tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.cache_dtypes import CACHE_DTYPES
from quire.config.checks import (
    GIVEN_ALIKE,
    OWN,
    check_choices,
    check_flag,
    check_share,
    check_whole,
    choice,
    put_path,
    put_size,
)
from quire.config.kv_events import FORMATS, KVEventsConfig
from quire.config.kv_transfer import KVTransferConfig, read_kv_transfer
from quire.config.stores import put_stores
from quire.errors import ConfigError

KV_CACHE_DTYPES = ("auto", *CACHE_DTYPES)
EVICTION_POLICIES = ("lru", "fifo", "lfu", "slru")
WRITE_POLICIES = ("write_back", "write_through")
DEFAULT_MEMORY_FRACTION = 0.5
DEFAULT_GPU_UTILIZATION = 0.9
# A smaller number is a mistake: it was meant in GiB, as vLLM's swap_space is.
MIN_BYTES = 1024
# Size of the host tier for transfers of prefix caches outside memory, if there is no swap space.
STAGING_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Size and layout of the KV cache.

    Numbers of bytes, here and in the other parts, are integers or texts such as "4GiB", stored as integers.

    Args:
        block_size: number of tokens per block.
        kv_cache_dtype: dtype of the KV cache: "bfloat16", "float16", "float32", "fp8" (e4m3, without scales) or "int8"
            (with a float32 scale per token and head); "auto" is the dtype of the weights.
        num_kv_blocks: size of the KV cache in usable blocks, instead of bytes or a share of the memory.
        kv_cache_memory_bytes: size of the KV cache in bytes.
        kv_cache_memory_fraction: share of the memory for the KV cache that is available after the weights are loaded,
            on a CPU, if no size is given.
        gpu_memory_utilization: share of a GPU's total memory for weights, the largest step and the KV cache together,
            if no size is given; the step's memory is measured.
        enable_prefix_caching: reuse cached blocks of equal prefixes.
        eviction_policy: order in which idle blocks are evicted: "lru" (idle for longest), "fifo" (published first),
            "lfu" (used least often) or "slru" (never reused first).
        state_snapshot_interval: number of tokens between two snapshots of recurrent states in the prefix cache, a
            multiple of the block size; None takes 512. Steps that compute prompts end at these positions.
        watermark: share of the KV memory that an admission leaves free for the growth of running sequences, as the
            nearest number of slabs (with one cache group: blocks).
        pin_limit: share of the KV memory that pinned prefixes may fill; it is not available to sequences.
        retention_limit: share of the KV memory for blocks of requests with `retain_cache`, which are evicted after all
            others; 0 ignores `retain_cache`.
        kv_cache_metrics_sample: share of the blocks whose lifetime, idle time and reuse are measured; 0 measures none.
        swap_space: bytes of host memory for the blocks of preempted sequences; 0, the default, for none, since on a CPU
            they are taken from the KV cache. A small number, which would be GiB in vLLM, is refused: write "4GiB".
        prefix_cache_dir: folder of a prefix cache on disk, which persists after the engine ends. The engines of one
            host, each in its own process, can share it.
        prefix_cache_disk_bytes: maximum size of `prefix_cache_dir`, the same for all engines that use it; the least
            recently used blocks are evicted.
        prefix_cache_url: address of a remote prefix cache, a Valkey or Redis server that engines of several hosts
            share: "redis://HOST:PORT/DATABASE". A slow or unreachable server costs cache misses, but does not block.
        prefix_cache_timeout_s: maximum time that a prompt waits for that server, in seconds.
        prefix_cache_ttl_s: lifetime of an unused block on that server, in seconds; None for no limit.
        prefix_cache_write_policy: when blocks are written to disk and to that server: "write_back" (when they are
            evicted from memory, and at shutdown) or "write_through" (when their request ends, so that other engines
            find them). None takes "write_through" with `prefix_cache_url`, else "write_back".
        kv_transfer_config: KV transfer to and from other engines, vLLM's JSON object or a mapping; see
            `KVTransferConfig`. None transfers nothing.
        record_memory: new file for a log of every memory command, which `quire replay` replays.
        kv_events_config: publication of KV events (blocks stored and evicted), for routers: an object with vLLM's keys,
            such as `{"enable_kv_cache_events": true, "replay_endpoint": "tcp://127.0.0.1:5558"}`. None publishes
            nothing.
        kv_events_format: format of an event: "map", or "array" for consumers that do not support maps.
    """

    block_size: int = 16
    kv_cache_dtype: str = choice("auto", KV_CACHE_DTYPES)
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_memory_fraction: float = DEFAULT_MEMORY_FRACTION
    gpu_memory_utilization: float = DEFAULT_GPU_UTILIZATION
    enable_prefix_caching: bool = True
    eviction_policy: str = choice("lru", EVICTION_POLICIES)
    state_snapshot_interval: int | None = None
    watermark: float = 0.01
    swap_space: int = 0
    pin_limit: float = 0.0
    retention_limit: float = 0.25
    kv_cache_metrics_sample: float = 0.01
    prefix_cache_dir: str | None = field(default=None, metadata=GIVEN_ALIKE)
    prefix_cache_disk_bytes: int = 8 << 30
    prefix_cache_url: str | None = None
    prefix_cache_timeout_s: float = 0.25
    prefix_cache_ttl_s: float | None = 86400.0
    prefix_cache_write_policy: str | None = field(default=None, metadata={"choices": WRITE_POLICIES})
    kv_transfer_config: str | None = None
    record_memory: str | None = field(default=None, metadata=OWN)
    kv_events_config: Mapping[str, Any] | None = field(default=None, metadata=OWN)
    kv_events_format: str = choice("map", FORMATS)

    def __post_init__(self) -> None:
        check_choices(self)
        check_whole("block_size", self.block_size, 1, 1024)
        check_whole("num_kv_blocks", self.num_kv_blocks, 1, optional=True)
        put_size(self, "kv_cache_memory_bytes", 1, optional=True)
        _check_unit("kv_cache_memory_bytes", self.kv_cache_memory_bytes, "for the KV cache")
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        check_share("kv_cache_memory_fraction", self.kv_cache_memory_fraction, 1.0, positive=True)
        check_share("gpu_memory_utilization", self.gpu_memory_utilization, 1.0, positive=True)
        check_whole("state_snapshot_interval", self.state_snapshot_interval, 1, optional=True)
        interval = self.state_snapshot_interval
        if interval is not None and interval % self.block_size:
            raise ConfigError(
                f"state_snapshot_interval must be a multiple of block_size ({self.block_size}), got {interval}: states "
                "are reused at the ends of whole blocks only",
                field="state_snapshot_interval",
            )
        check_share("watermark", self.watermark, 0.5)
        check_share("pin_limit", self.pin_limit, 0.9)
        check_share("retention_limit", self.retention_limit, 0.9)
        check_share("kv_cache_metrics_sample", self.kv_cache_metrics_sample, 1.0)
        put_size(self, "swap_space", 0)
        _check_unit("swap_space", self.swap_space, "of host memory")
        put_path(self, "prefix_cache_dir", optional=True)
        put_size(self, "prefix_cache_disk_bytes", 1)
        put_stores(self)
        put_path(self, "record_memory", optional=True)
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config needs enable_prefix_caching, which is off: there would be no events",
                field="kv_events_config",
            )

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Options of KV events; None if they are not published."""
        return KVEventsConfig.read(self.kv_events_config, self.kv_events_format)

    @property
    def host_bytes(self) -> int:
        """Size of the host tier in bytes: the swap space, or the transfer buffer of a prefix cache outside memory."""
        return self.swap_space or (STAGING_BYTES if self.has_stores else 0)

    @property
    def has_stores(self) -> bool:
        """True if blocks are stored on disk or remotely, or transferred."""
        names = ("prefix_cache_dir", "prefix_cache_url", "kv_transfer_config")
        return any(getattr(self, name) is not None for name in names)

    @property
    def transfer(self) -> KVTransferConfig | None:
        """Options of KV transfer, or None."""
        return read_kv_transfer(self.kv_transfer_config)

    @property
    def writes_through(self) -> bool:
        """True if blocks are written to stores when their request ends."""
        if self.prefix_cache_write_policy is None:
            return self.prefix_cache_url is not None
        return self.prefix_cache_write_policy == "write_through"

    @property
    def host_option(self) -> str:
        """Name of the option that determines `host_bytes`."""
        if self.swap_space:
            return "swap_space"
        names = ("prefix_cache_dir", "prefix_cache_url", "kv_transfer_config")
        return next((name for name in names if getattr(self, name) is not None), names[0])


def _check_unit(name: str, num_bytes: int | None, what: str) -> None:
    """Refuse a number of bytes that is so small that it was meant in GiB."""
    if num_bytes is not None and 0 < num_bytes < MIN_BYTES:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(
            f'{name}={num_bytes} is {num_bytes} bytes {what}; for GiB, write {name}="{num_bytes}GiB" (on the command '
            f"line: {flag} {num_bytes}GiB)",
            field=name,
        )
