"""KV events: the blocks that a manager publishes and withdraws, for cache-aware request routers.

Publishing a block at a position of the prefix tree, or withdrawing one, gives an event, in order. So a consumer that
applies all events, from an empty cache or from a snapshot on, knows the published blocks of every group and tier:

```
 BlockStored([h0, h1], parent None, tokens)   the first two blocks of a prompt
 BlockStored([h2], parent h1, tokens)         the block after them
 BlockRemoved([h2])                           it was evicted
 AllBlocksCleared()                           the cache was reset
```

Names, fields and media are vLLM's, so that its consumers understand them. A hash names a block and all before it:
equal prefixes of one manager have equal hashes, on all tiers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from struct import Struct, unpack
from typing import NamedTuple

from quire.memory.manager import KVCacheManager
from quire.memory.prefix.prompt_embeddings import read_entries
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.radix_node import NodePosition, RadixNode
from quire.memory.prefix.token_chain import DIGEST_BYTES, TOKEN_BYTES, Namespace
from quire.memory.results import Tier
from quire.memory.specs import ChunkedLocal, FullAttention, KVCacheSpec, SlidingWindow

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
# The first item of the extra key of a tenant; the first item of a media key is a digest.
TENANT = "tenant"
# Maximum number of groups that consumers distinguish.
MAX_GROUPS = 64

# A salt; (`TENANT`, tenant); or (digest of media, their first position relative to the block's start).
ExtraKey = str | tuple[str, str | int]
# The extra keys of each block, None for a block without any.
ExtraKeys = tuple[tuple[ExtraKey, ...] | None, ...]


class BlockStored(NamedTuple):
    """Consecutive blocks were published.

    Args:
        block_hashes: hash of each block.
        parent_block_hash: hash of the block before the first; None for the first block of a namespace.
        tokens: token ids of all blocks, 4 bytes each, little endian on all supported machines.
        block_size: number of tokens of each block; fewer than the cache's block size for a tail.
        medium: tier of the blocks.
        group_idx: cache group of the blocks.
        adapter: adapter with which the blocks were computed.
        extra_keys: salt, tenant and media of each block; None if no block has any. Only the first block of a namespace
            has the salt and the tenant.
        kind: vLLM's name for the kind of the group's cache.
        window: number of tokens of the group's window or chunk; None for other kinds.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    tokens: bytes
    block_size: int
    medium: str
    group_idx: int = 0
    adapter: str | None = None
    extra_keys: ExtraKeys | None = None
    kind: str = "full_attention"
    window: int | None = None

    @property
    def token_ids(self) -> list[int]:
        """Token ids of all blocks."""
        return list(token_ids_of(self.tokens))


class BlockRemoved(NamedTuple):
    """Blocks were withdrawn.

    Args:
        block_hashes: hash of each block.
        medium: tier of the blocks.
        group_idx: cache group of the blocks.
    """

    block_hashes: tuple[int, ...]
    medium: str
    group_idx: int = 0


class AllBlocksCleared(NamedTuple):
    """All blocks of all tiers were withdrawn."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


# The low 64 bits of a digest.
_LOW = f"{DIGEST_BYTES - 8}xQ"
_ONE = Struct(">" + _LOW)


def hash_of(digest: bytes) -> int:
    """Return the hash of a block in events: the low 64 bits of its digest."""
    block_hash: int = _ONE.unpack(digest)[0]
    return block_hash


def _hashes_of(digests: Sequence[bytes]) -> tuple[int, ...]:
    """Return the hashes of blocks, all in one call: a step may publish and evict hundreds."""
    if len(digests) == 1:
        return _ONE.unpack(digests[0])
    return unpack(">" + _LOW * len(digests), b"".join(digests))


def token_ids_of(tokens: bytes) -> tuple[int, ...]:
    """Return the ids of encoded tokens."""
    return unpack(f"{len(tokens) // TOKEN_BYTES}I", tokens)


@lru_cache(maxsize=1024)
def _namespace_of(content: bytes) -> Namespace:
    return Namespace.deserialise(content)


def _kind_of(spec: KVCacheSpec) -> tuple[str, int | None]:
    """Return vLLM's name of a kind of cache, and its window."""
    if isinstance(spec, FullAttention):
        return "full_attention", None
    if isinstance(spec, SlidingWindow):
        return "sliding_window", spec.window
    if isinstance(spec, ChunkedLocal):
        return "chunked_local_attention", spec.chunk
    return "mamba", None


class _Removal:
    """Blocks that a pool withdrew one after the other, for one `BlockRemoved` event."""

    __slots__ = ("digests", "group_idx", "medium")

    def __init__(self, digests: list[bytes], medium: str, group_idx: int) -> None:
        self.digests = digests
        self.medium = medium
        self.group_idx = group_idx


class KVEventCollector:
    """Collects the events of a manager until they are taken, in the thread that owns the manager.

    Args:
        manager: memory manager; its pools report to the collector from now on.
        adapter_name: function from an adapter's digest to its name.
    """

    def __init__(self, manager: KVCacheManager, adapter_name: Callable[[str], str] = str) -> None:
        self._collected: list[KVEvent | _Removal] = []
        self._manager = manager
        self._adapter_name = adapter_name
        self._pools: list[_PoolPublications] = []
        self._kinds = [_kind_of(group.spec) for group in manager.groups]
        tiers = [(Tier.DEVICE, manager.groups)]
        if manager.host is not None:
            tiers.append((Tier.HOST, manager.host.groups))
        for tier, groups in tiers:
            for group_idx, group in enumerate(groups):
                observer = _PoolPublications(self, self._collected, group.pool.index, group_idx, MEDIA[tier])
                group.pool.index.observer = observer
                self._pools.append(observer)

    @property
    def has_events(self) -> bool:
        """True if there are events that were not taken yet."""
        return bool(self._collected)

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call."""
        events = [
            BlockRemoved(_hashes_of(event.digests), event.medium, event.group_idx)
            if isinstance(event, _Removal)
            else event
            for event in self._collected
        ]
        self._collected.clear()
        return events

    def snapshot(self) -> list[KVEvent]:
        """Return an `AllBlocksCleared`, then events that store all published blocks.

        The snapshot includes events that were not taken yet; they need not be applied.
        """
        events: list[KVEvent] = [AllBlocksCleared()]
        for node in self._manager.tree.nodes():
            for pool in self._pools:
                events += pool.stored_of(node)
        return events

    def stored(self, node: RadixNode, start: int, count: int, group_idx: int, medium: str) -> BlockStored:
        """Return the event for blocks of a node that are published."""
        size = min(len(node.data), node.layout.block_bytes)  # a tail has one block, which is not full
        end = start + count
        digests = node.digests(end)  # of all blocks at once
        is_first = node.first + start == 0
        namespace = _namespace_of(node.namespace)
        extra_keys: ExtraKeys | None = None
        if node.entries or (is_first and (namespace.cache_salt, namespace.tenant) != (None, None)):
            keys = [_extra_keys(node, position, namespace) for position in range(start, end)]
            extra_keys = tuple(keys) if any(keys) else None
        kind, window = self._kinds[group_idx]
        return BlockStored(
            _hashes_of(digests[start:end]),
            None if is_first else hash_of(digests[start - 1] if start else node.digest_before(0)),
            bytes(node.data[start * size : end * size]),
            size // TOKEN_BYTES,
            medium,
            group_idx,
            None if namespace.adapter is None else self._adapter_name(namespace.adapter),
            extra_keys,
            kind,
            window,
        )

    def saved(self, group_idx: int, where: NodePosition) -> BlockStored:
        """Return the event for a block that is about to be written to disk."""
        return self.stored(*where, 1, group_idx, MEDIA[Tier.DISK])


class _PoolPublications:
    """Reports the published and withdrawn blocks of one pool; a `PublicationObserver`."""

    __slots__ = ("_collected", "_collector", "_group_idx", "_index", "_medium")

    def __init__(
        self,
        collector: KVEventCollector,
        collected: list[KVEvent | _Removal],
        index: PublishedBlocks,
        group_idx: int,
        medium: str,
    ) -> None:
        self._collector = collector
        self._collected = collected
        self._index = index
        self._group_idx = group_idx
        self._medium = medium

    def on_publish(self, node: RadixNode, start: int, count: int) -> None:
        """Collect the event of published blocks."""
        self._collected.append(self._collector.stored(node, start, count, self._group_idx, self._medium))

    def on_withdraw(self, node: RadixNode, positions: Sequence[int]) -> None:
        """Collect the event of withdrawn blocks; consecutive ones of a pool share an event."""
        node_digests = node.digests(max(positions) + 1)
        digests = [node_digests[position] for position in positions]
        last = self._collected[-1] if self._collected else None
        if isinstance(last, _Removal) and last.group_idx == self._group_idx and last.medium == self._medium:
            last.digests += digests
        else:
            self._collected.append(_Removal(digests, self._medium, self._group_idx))

    def on_clear(self) -> None:
        """Collect the event of a reset, once for all pools."""
        if not self._collected or not isinstance(self._collected[-1], AllBlocksCleared):
            self._collected.append(AllBlocksCleared())

    def stored_of(self, node: RadixNode) -> list[BlockStored]:
        """Return the events of a node's blocks that are published, one for each run without a gap."""
        events: list[BlockStored] = []
        start = 0
        for position in range(node.length + 1):
            if position < node.length and self._index.at((node, position)):
                continue
            if start < position:
                events.append(self._collector.stored(node, start, position - start, self._group_idx, self._medium))
            start = position + 1
        return events


def _extra_keys(node: RadixNode, position: int, namespace: Namespace) -> tuple[ExtraKey, ...] | None:
    """Return the salt, tenant and media that a block depends on, in addition to its tokens and earlier blocks."""
    keys: list[ExtraKey] = [(span.digest.hex(), span.start) for span in read_entries(node.entries.get(position, b""))]
    if node.first + position == 0:
        if namespace.cache_salt is not None:
            keys.append(namespace.cache_salt)
        if namespace.tenant is not None:
            keys.append((TENANT, namespace.tenant))
    return tuple(keys) or None


def encode(token_ids: Iterable[int]) -> bytes:
    """Return token ids in the encoding of block contents.

    Raises:
        OverflowError: an id is negative, or has more than 32 bits.
    """
    return array("I", token_ids).tobytes()
