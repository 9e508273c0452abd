"""The shadow tree: the contents of all replicas' caches, from their KV events.

```
 namespace --- [ a ] --- [ b ] --- [ c ]        a node: one block of tokens, after its parent's
                 {0, 1}    {0, 1}  |  {0}       its holders: replicas, with groups and tiers of the block
                                   +--- [ x ]
                                          {1}
```

Logically each replica has its own tree. The trees share nodes, so that a prompt is compared only once, block by block,
for any number of replicas. Tokens are compared, not hashes, because two replicas' hashes of a block differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from quire.memory.kv_events import MAX_GROUPS, TENANT, AllBlocksCleared, BlockRemoved, BlockStored, ExtraKey, KVEvent
from quire.memory.prefix.token_chain import TOKEN_BYTES, num_common
from quire.memory.specs import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow

# Number of blocks after a prompt's whole blocks that are compared with its last tokens.
MAX_PARTIAL = 32
# Number of removed blocks that are stored, in addition to half the number of present blocks.
MIN_TOMBSTONES = 64
# Share of a block's computing time that a hit saves, by tier: blocks of lower tiers must be copied first.
TIER_VALUES = {"GPU": 1.0, "CPU": 0.9, "STORAGE": 0.5}
_TIERS = tuple(TIER_VALUES)
# The bits of each tier for all groups, with the tier's value.
_TIER_BITS = tuple(
    (sum(1 << group_idx * len(_TIERS) + tier for group_idx in range(MAX_GROUPS)), value)
    for tier, value in enumerate(TIER_VALUES.values())
)
_Spec = FullAttention | SlidingWindow | ChunkedLocal | RecurrentState


class Scope(NamedTuple):
    """The scope within which requests share blocks, as a router knows it.

    Args:
        adapter: name of the adapter; None for the model alone.
        cache_salt: salt in the engines' form.
        tenant: tenant of the client.
    """

    adapter: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None


class Hit(NamedTuple):
    """A prefix that a replica can reuse.

    Args:
        num_tokens: length of the prefix.
        value: tokens that count as saved; fewer if blocks are on lower tiers.
    """

    num_tokens: int
    value: float


NO_HIT = Hit(0, 0.0)


class ShadowNode:
    """One block of tokens."""

    __slots__ = ("children", "content", "has_media", "holders", "parent")

    def __init__(self, parent: ShadowNode | None, content: bytes, *, has_media: bool = False) -> None:
        self.parent = parent
        self.content = content
        self.has_media = has_media
        self.children: dict[bytes, ShadowNode] = {}
        # A bit for each group and tier, by replica.
        self.holders: dict[int, int] = {}


class ReplicaBlocks:
    """The blocks of one replica."""

    __slots__ = ("block_size", "nodes", "num_unplaced", "replica", "specs", "tombstones")

    def __init__(self, replica: int, block_size: int = 0) -> None:
        self.replica = replica
        self.block_size = block_size
        self.specs: dict[int, _Spec] = {}
        self.nodes: dict[int, ShadowNode] = {}
        self.tombstones: dict[int, ShadowNode] = {}
        self.num_unplaced = 0


class ShadowTree:
    """The published blocks of all replicas."""

    def __init__(self) -> None:
        self.replicas: dict[int, ReplicaBlocks] = {}
        self._roots: dict[Scope, ShadowNode] = {}

    # ---- commands ----

    def add_replica(self, replica: int, block_size: int = 0) -> None:
        """Add a replica without blocks."""
        self.replicas[replica] = ReplicaBlocks(replica, block_size)

    def remove_replica(self, replica: int) -> None:
        """Forget a replica and its blocks."""
        self.clear(replica)
        del self.replicas[replica]

    def clear(self, replica: int) -> None:
        """Forget all blocks of a replica."""
        blocks = self.replicas[replica]
        for node in (*blocks.nodes.values(), *blocks.tombstones.values()):
            node.holders.pop(replica, None)
            self._prune(node)
        blocks.nodes, blocks.tombstones = {}, {}

    def apply(self, replica: int, events: Iterable[KVEvent]) -> None:
        """Apply events of a replica, in order."""
        blocks = self.replicas[replica]
        for event in events:
            if isinstance(event, BlockStored):
                self._store(blocks, event)
            elif isinstance(event, BlockRemoved):
                self._remove(blocks, event)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.clear(replica)

    # ---- queries ----

    def num_blocks(self, replica: int) -> int:
        """Return the number of different blocks in a replica's cache."""
        return len(self.replicas[replica].nodes)

    def path(self, token_bytes: bytes, scope: Scope, block_size: int) -> list[ShadowNode]:
        """Return the nodes of a prompt's leading whole blocks, up to the first block without a node."""
        node = self._roots.get(scope)
        size, path = block_size * TOKEN_BYTES, list[ShadowNode]()
        if not size:  # a replica without events
            return path
        # At least one token is left to compute.
        for start in range(0, (len(token_bytes) - TOKEN_BYTES) // size * size, size):
            node = node.children.get(token_bytes[start : start + size]) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def hit(self, replica: int, path: Sequence[ShadowNode], token_bytes: bytes, scope: Scope) -> Hit:
        """Return the longest prefix of a prompt that a replica can reuse."""
        blocks = self.replicas[replica]
        if not blocks.block_size or not blocks.specs:
            return NO_HIT
        masks = [node.holders.get(replica, 0) for node in path]
        length = _longest(blocks.specs, masks)
        value = sum(_value_of(mask) for mask in masks[:length]) * blocks.block_size
        last = path[length - 1] if length else self._roots.get(scope)
        num_partial = 0
        if last is not None and all(isinstance(spec, FullAttention) for spec in blocks.specs.values()):
            start = length * blocks.block_size * TOKEN_BYTES
            end = min(len(token_bytes) - TOKEN_BYTES, start + blocks.block_size * TOKEN_BYTES)
            num_partial = _longest_partial(last, replica, token_bytes[start:end])
        return Hit(length * blocks.block_size + num_partial, value + num_partial)

    def contents(self, replica: int) -> dict[int, int]:
        """Return the hashes of a replica's blocks, each with the bits of its groups and tiers."""
        return {name: node.holders[replica] for name, node in self.replicas[replica].nodes.items()}

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including roots."""
        pending, count = list(self._roots.values()), 0
        while pending:
            count += 1
            pending += pending.pop().children.values()
        return count

    # ---- parts ----

    def _store(self, blocks: ReplicaBlocks, event: BlockStored) -> None:
        if event.block_size > blocks.block_size:  # the first events may be for partial blocks
            blocks.block_size = event.block_size
            blocks.specs = {idx: replace(spec, block_size=event.block_size) for idx, spec in blocks.specs.items()}
        if event.group_idx not in blocks.specs:
            blocks.specs[event.group_idx] = _spec_of(event, blocks.block_size)
        if event.parent_block_hash is None:
            scope = _scope_of(event)
            parent = self._roots.get(scope)
            if parent is None:
                parent = self._roots[scope] = ShadowNode(None, b"")
        else:
            name = event.parent_block_hash
            parent_node = blocks.nodes.get(name) or blocks.tombstones.get(name)
            if parent_node is None:
                blocks.num_unplaced += len(event.block_hashes)
                return
            parent = parent_node
        bit, size = bit_of(event.group_idx, event.medium), event.block_size * TOKEN_BYTES
        for idx, name in enumerate(event.block_hashes):
            content = event.tokens[idx * size : (idx + 1) * size]
            if event.extra_keys is not None and event.extra_keys[idx] is not None:
                content += _media_content(event.extra_keys[idx] or ())
            node = parent.children.get(content)
            if node is None:
                node = parent.children[content] = ShadowNode(parent, content, has_media=len(content) > size)
            node.holders[blocks.replica] = node.holders.get(blocks.replica, 0) | bit
            blocks.nodes[name] = node
            if blocks.tombstones:
                blocks.tombstones.pop(name, None)
            parent = node

    def _remove(self, blocks: ReplicaBlocks, event: BlockRemoved) -> None:
        bit = bit_of(event.group_idx, event.medium)
        for name in event.block_hashes:
            node = blocks.nodes.get(name)
            if node is None:
                continue
            mask = node.holders.get(blocks.replica, 0) & ~bit
            if mask:
                node.holders[blocks.replica] = mask
                continue
            del blocks.nodes[name]
            node.holders[blocks.replica] = 0
            blocks.tombstones[name] = node
            while len(blocks.tombstones) > len(blocks.nodes) // 2 + MIN_TOMBSTONES:
                oldest = blocks.tombstones.pop(next(iter(blocks.tombstones)))
                oldest.holders.pop(blocks.replica, None)
                self._prune(oldest)

    def _prune(self, node: ShadowNode) -> None:
        """Remove a node without holders and children, and then its ancestors without any."""
        while node.parent is not None and not node.holders and not node.children:
            parent, node.parent = node.parent, None
            del parent.children[node.content]
            node = parent


class _HeldBlocks:
    """The blocks of one replica and group along a path, a `PublishedRun`."""

    __slots__ = ("_bits", "_masks")

    def __init__(self, masks: Sequence[int], group_idx: int) -> None:
        self._masks = masks
        self._bits = ((1 << len(_TIERS)) - 1) << group_idx * len(_TIERS)

    def leading(self, limit: int) -> int:
        """Return the number of leading blocks without a gap, at most `limit`."""
        return next((idx for idx in range(limit) if not self._masks[idx] & self._bits), limit)

    def last_gap(self, start: int, end: int) -> int:
        """Return the last block in `[start, end)` that the replica does not hold, or -1."""
        return next((idx for idx in range(end - 1, start - 1, -1) if not self._masks[idx] & self._bits), -1)


def bit_of(group_idx: int, medium: str) -> int:
    """Return the bit of a group and a tier in the masks of holders; unknown tiers count as the lowest."""
    tier = _TIERS.index(medium) if medium in TIER_VALUES else len(_TIERS) - 1
    return 1 << group_idx * len(_TIERS) + tier


def _longest(specs: dict[int, _Spec], masks: Sequence[int]) -> int:
    """Return the longest prefix, in blocks, that all groups can serve, by the rules of an engine."""
    length = len(masks)
    runs = [(spec, _HeldBlocks(masks, group_idx)) for group_idx, spec in specs.items()]
    while length:
        before = length
        for spec, run in runs:
            length = spec.longest_hit(run, length)
        if length < before:
            continue
        # At the end of a chunk no block is needed; the last block must be present nevertheless.
        size = runs[0][0].block_size
        if masks[length - 1] or any(spec.first_live_token(length * size) < length * size for spec, _ in runs):
            break
        length -= 1
    return length


def _value_of(mask: int) -> float:
    """Return the value of a block, by its best tier in any group."""
    return next((value for bits, value in _TIER_BITS if mask & bits), 0.0)


def _longest_partial(node: ShadowNode, replica: int, wanted: bytes) -> int:
    """Return the longest common prefix, in tokens, of the wanted tokens and the replica's blocks below a node.

    Only the most recent blocks are compared. A block with media is hit only as a whole.
    """
    best = 0
    for content in islice(reversed(node.children), MAX_PARTIAL):
        child = node.children[content]
        if child.holders.get(replica) and not child.has_media and content[:TOKEN_BYTES] == wanted[:TOKEN_BYTES]:
            best = max(best, num_common(content[: len(wanted)], wanted))
    return best


def _scope_of(event: BlockStored) -> Scope:
    """Return the scope of the first block of a chain."""
    keys: Sequence[ExtraKey] = (event.extra_keys[0] or ()) if event.extra_keys else ()
    salt = next((key for key in keys if isinstance(key, str)), None)
    tenant = next((key[1] for key in keys if not isinstance(key, str) and key[0] == TENANT), None)
    return Scope(event.adapter, salt, None if tenant is None else str(tenant))


def _media_content(keys: Sequence[ExtraKey]) -> bytes:
    """Return the addition of a block's media to its content; salts and tenants are in the scope."""
    spans = [key for key in keys if not isinstance(key, str) and key[0] != TENANT]
    return repr(spans).encode() if spans else b""


def _spec_of(event: BlockStored, block_size: int) -> _Spec:
    """Return the kind of cache of an event's group."""
    if event.kind == "sliding_window" and event.window:
        return SlidingWindow(block_size=block_size, window=event.window)
    if event.kind == "chunked_local_attention" and event.window:
        return ChunkedLocal(block_size=block_size, chunk=event.window)
    if event.kind == "mamba":
        return RecurrentState(block_size=block_size)
    return FullAttention(block_size=block_size)
