"""The KV cache manager: block tables over shared, forked, published and evicted blocks.

It knows ids, tokens and counts; it moves no bytes. Questions (`match_prefix`, `capacity`, `usage`) may cache (a match
keeps the encoded tokens and a cursor in the chain), but change no block and no later answer. Commands happen wholly or
not at all (M7), and the same commands always give the same ids (M10).

```
 tokens   |<-- hit -->|<-- computed -->|<-- slots reserved, KV not written -->|
 blocks   [ shared   ][ shared ][ own  ][ own ][ new ][ new ]
                      num_published     num_computed           num_slots
```

Owner: one thread, the one that steps the engine. Nothing in here locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from quire.memory.capacity.admission import count_loads, count_woken
from quire.memory.capacity_queries import CapacityQueries
from quire.memory.groups.cache_group import CacheGroup
from quire.memory.groups.host_tier import HostTier
from quire.memory.groups.match import find_hit
from quire.memory.pins import Pins
from quire.memory.pool.arena import build_arena
from quire.memory.pool.eviction import EVICTION_POLICIES
from quire.memory.prefix.prompt_embeddings import MediaSpan
from quire.memory.prefix.radix_tree import RadixTree
from quire.memory.prefix.token_chain import Namespace, TokenChain, root_of
from quire.memory.results import NO_OPS, HitEnd, MemoryOps, PrefixHit, TableDelta, Tier
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.specs import NEVER_FREED, KVCacheSpec
from quire.memory.tables import append
from quire.memory.tables.publication import Publication
from quire.memory.tables.rollback import Rollback
from quire.memory.tables.tables import BlockTables
from quire.memory.tiers import swap
from quire.memory.tiers.disk_tier import DiskTier
from quire.memory.tiers.lost_copies import LostCopies
from quire.memory.usage import Usage, measure


class KVCacheManager:
    """Owns every block of the KV cache.

    Args:
        specs: one for each cache group; all with the same block size.
        num_blocks: usable blocks, for one group; for several with blocks of the same bytes, so many for each of them,
            but shared by all. Or:
        num_bytes: the memory that all groups share, the null block included.
        watermark: slabs (with one group: blocks) that an admission leaves free while other sequences live.
        enable_prefix_caching: publish full blocks and find them again.
        eviction: a name in `EVICTION_POLICIES`.
        pin_limit: slabs (with one group: blocks) that pinned prefixes may fill; nothing may count on those.
        snapshot_interval: tokens, a multiple of the block size: a group of states publishes one every so often.
        host_bytes: the memory of the host tier, its null block included; 0 for none.
        retention_limit: slabs (with one group: blocks) whose bytes blocks with the hint to evict them last may fill.
        has_disk: True where blocks that the host evicts are saved to disk; see `archive`.
        key: a secret for the digests, at most 64 bytes.

    Attributes:
        capacity: questions about room.
        rollback: questions about how far a sequence can be truncated.
        pins: the pinned prefixes.
        archive: commands of the disk tier; None without one.
        lost_copies: commands after a failed step.
        tables: block tables of all sequences; `tables.observer` receives every command.

    Invariants: M1 to M11, checked by `quire.memory.invariants.check`.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_blocks: int | None = None,
        *,
        num_bytes: int | None = None,
        watermark: int = 0,
        enable_prefix_caching: bool = True,
        eviction: str = "lru",
        pin_limit: int = 0,
        snapshot_interval: int | None = None,
        host_bytes: int = 0,
        retention_limit: int = 0,
        has_disk: bool = False,
        key: bytes = b"",
    ) -> None:
        sizes = {spec.block_size for spec in specs}
        if len(sizes) != 1:
            raise ValueError(f"cache groups must share one block size, got {sorted(sizes)}")
        self.block_size = sizes.pop()
        block_bytes = [spec.bytes_per_block for spec in specs]
        policy = EVICTION_POLICIES[eviction]
        # All groups of tokens publish the same blocks: one of them notes what comes after a block.
        child_index_pool = next((idx for idx, spec in enumerate(specs) if not spec.is_recurrent), None)
        self.tree = RadixTree(self.block_size, len(specs) * (2 if host_bytes else 1), child_index_pool)
        self.arena = build_arena(block_bytes, num_blocks, num_bytes, policy, self.tree, retention_limit=retention_limit)
        self.tree.max_tombstones = max(pool.index.num_ids for pool in self.arena.pools) - 1
        self.pins = Pins(self.arena, pin_limit)
        self.groups = tuple(CacheGroup(spec, pool) for spec, pool in zip(specs, self.arena.pools, strict=True))
        self.host = HostTier(self.arena, self.groups, host_bytes, policy, self.tree) if host_bytes else None
        self.tables = BlockTables(self.arena, self.groups, self.pins, self.host)
        self.archive = DiskTier(self.tables) if has_disk else None
        self.watermark, self.enable_prefix_caching = watermark, enable_prefix_caching
        self.sequences = self.tables.sequences
        self._key = key
        self.windowed_groups = tuple(idx for idx, spec in enumerate(specs) if spec.freed_after(0) < NEVER_FREED)
        self.capacity = CapacityQueries(self.tables, watermark, self.arena.layout.num_slabs - pin_limit)
        self._publication = Publication(self.tables, self.windowed_groups, snapshot_interval)
        self.rollback = Rollback(self.tables, self.windowed_groups)
        self.lost_copies = LostCopies(self.tables)

    # ---- questions ----

    def chain(self, tokens: list[int], namespace: Namespace, media: Sequence[MediaSpan] = ()) -> TokenChain:
        """Return a chain over `tokens` for the other verbs; see `TokenChain` for who owns the list."""
        return TokenChain(tokens, root_of(namespace, self._key), self.block_size, media)

    def match_prefix(self, chain: TokenChain, max_tokens: int | None = None) -> PrefixHit:
        """Find the longest usable published prefix, over all groups and tiers: whole blocks, and part of one more.

        Args:
            chain: the sequence's tokens; at least one of them is left to compute.
            max_tokens: reuse at most so many tokens (prompt log probabilities need the logits of the rest).
        """
        if not self.enable_prefix_caching:
            return PrefixHit(0, ((),) * len(self.groups), HitEnd.LIMIT, None, self.tables.version)
        host_groups = self.host.groups if self.host is not None else ()
        keeps_all = not (self.windowed_groups or self.tables.recurrent_groups)
        return find_hit(self.groups, chain, max_tokens, self.tables.version, host_groups, keeps_all=keeps_all)

    def step_limit(self, seq_id: int, num_tokens: int) -> int:
        """Return how many of a live sequence's next tokens may be computed in one step.

        A step that went past the next snapshot of its state would leave none there; without groups of states, all.

        Args:
            seq_id: a live sequence.
            num_tokens: tokens behind those that have slots.
        """
        return self._publication.step_limit(self.sequences[seq_id], num_tokens)

    def is_snapshot_pending(self, seq_id: int) -> bool:
        """Return whether a live sequence's states are to be stored before a step goes on from its present slots."""
        return self._publication.is_snapshot_pending(self.sequences[seq_id])

    def block_table(self, seq_id: int, group_idx: int = 0) -> tuple[int, ...]:
        """Return a live sequence's block ids in one cache group."""
        return tuple(self.sequences[seq_id].tables[group_idx])

    def usage(self) -> Usage:
        """Return block counts, of all groups and of each, and counters since the start."""
        return measure(self.tables, self._publication.num_merges)

    # ---- commands ----

    def allocate(self, seq_id: int, chain: TokenChain, hit: PrefixHit) -> None:
        """Open a sequence on a hit: its slots are those of the hit, all computed; what is on the host is copied.

        The chain's tokens at this moment are its prompt: a snapshot of states is taken close to their end.

        A block that the hit uses in part is shared like the others; `append_slots` has it copied before it is written.

        Raises:
            ValueError: the sequence is live already, the hit is older than another command, or the device has no
                room for what would be copied, which `can_allocate` counts.
        """
        if seq_id in self.sequences:
            raise ValueError(f"seq_id must not be the ID of a live sequence, got {seq_id}")
        if hit.version != self.tables.version:
            raise ValueError("the prefix hit is stale: no command may run between match_prefix and allocate")
        if hit.loads:
            swap.require_room(self.tables, count_woken(self.groups, hit), count_loads(self.groups, hit))
        self.tables.version += 1
        state = SequenceBlocks(chain, len(self.groups), is_publishing=self.enable_prefix_caching)
        self.tables.share(state, hit)
        self._publication.begin(state, hit)
        self.sequences[seq_id] = state
        if hit.loads:
            swap.load_hit(self.tables, state, hit.loads)
        if self.tables.observer is not None:
            self.tables.observer.allocated(seq_id, chain, hit)

    def append_slots(
        self, seq_ids: Sequence[int], num_tokens: int = 1, lookahead: int = 0, *, atomic: bool = False
    ) -> int:
        """Give sequences, one after the other, slots for more tokens in every group, up to the first that lacks blocks.

        Before the tail block is written (M3), it is copied where it is shared; where this sequence is its last
        holder and it is published (after `truncate`), it leaves the prefix index instead. States are written by
        every step; with a lookahead they are held as they are, which takes a block for each.

        Args:
            seq_ids: live sequences on the device, all different.
            num_tokens: tokens of each sequence that will be computed.
            lookahead: further tokens, of which verification may reject some; `truncate` takes their slots back.
            atomic: give one slot to all sequences, none of which looks ahead, or to none of them.

        Returns:
            Number of sequences, from the first on, that have their slots. The others are as they were.

        Raises:
            ValueError: fewer than one token, a negative lookahead, more than one token with `atomic`, or a sequence is
                swapped out.
        """
        num_granted = append.append_slots(self.tables, seq_ids, num_tokens, lookahead, atomic=atomic)
        if self.tables.observer is not None:
            self.tables.observer.appended(seq_ids, num_tokens, lookahead, num_granted, atomic=atomic)
        return num_granted

    def fork(self, parent_id: int, child_id: int, child_tokens: list[int]) -> TokenChain:
        """Open a child that shares all of its parent's blocks; only reference counts change.

        Args:
            parent_id: a live sequence whose slots are all computed.
            child_id: the new sequence.
            child_tokens: the child's own list, starting with the parent's computed tokens.

        Returns:
            The child's chain.

        Raises:
            ValueError: the child is live already, the parent is swapped out, or it has slots that are not written yet
                (both would write to them).
        """
        child = self.tables.fork(parent_id, child_id, child_tokens)
        if self.tables.observer is not None:
            self.tables.observer.forked(parent_id, child_id, child.num_slots)
        return child.chain

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Remove the slots from `num_tokens` on; the owner shortens the chain's tokens afterwards.

        Args:
            seq_id: a live sequence on the device.
            num_tokens: number of slots to keep, from `rollback.limit` to the present number. With recurrent groups one
                of these two: no state was stored for the lengths between them.

        Raises:
            ValueError: a number of slots that is not allowed, or the sequence is swapped out.
        """
        self.rollback.truncate(seq_id, num_tokens)

    def publish(self, seq_id: int, num_computed: int) -> None:
        """Record that the KV of the first `num_computed` tokens is stored and verified; publish the full blocks.

        A block whose identity is published already is a duplicate: the table takes the published one, and the
        duplicate is released. So are blocks that no later token reads, which null entries replace.
        States are published where a snapshot is due and all slots are computed.

        Raises:
            ValueError: `num_computed` shrinks, or exceeds the slots or the tokens; states looked ahead, and it is less
                than all slots: no state was kept there; or the sequence is swapped out.
        """
        self.publish_each({seq_id: num_computed})

    def publish_each(self, num_computed: Mapping[int, int]) -> None:
        """Publish several sequences in turn, given with their numbers of computed tokens; see `publish`."""
        sequences, observer = self.sequences, self.tables.observer
        for seq_id, count in num_computed.items():
            state = sequences[seq_id]
            if not state.num_computed <= count <= state.num_slots or count > len(state.chain.tokens):
                most = min(state.num_slots, len(state.chain.tokens))
                raise ValueError(f"num_computed must be in [{state.num_computed}, {most}], got {count}")
            if state.checkpoint is not None:
                self.tables.commit_lookahead(state, count)
            state.num_computed, num_before = count, state.num_published
            if count >= state.next_publish_at:
                self.tables.resident(seq_id)
                self._publication.publish_due(state)
            if observer is not None:
                observer.published(seq_id, state, num_before)

    def publish_next(self, seq_ids: Sequence[int]) -> None:
        """Publish sequences, different ones, of each of which one more token is computed; see `publish`."""
        self.publish_each(self._publication.add_computed(seq_ids))

    def free(self, seq_id: int, *, retain: bool = False, is_sound: bool = True) -> None:
        """Release a sequence; of its published blocks the tail becomes evictable before the head.

        Its partly filled last block is published too, as a tail, unless a published block has its tokens already.

        Args:
            seq_id: a live sequence.
            retain: have its published blocks evicted after those without this hint, within `retention_limit`.
            is_sound: False when it ends because a step failed: copies that were asked for may not have been made.
        """
        state = self.sequences.pop(seq_id)
        self.tables.version += 1
        state.is_publishing &= is_sound
        if self.archive is not None:
            self.archive.note_end(state)
        tail = None if state.is_swapped else self._publication.end(state)
        if retain:
            self.arena.evict_last(state.tables)
        self.tables.release(state)
        if self.host is not None and state.is_swapped:
            self.host.num_sequences -= 1
            swap.release_tier(self.tables, state, Tier.HOST)
        if self.tables.observer is not None:
            self.tables.observer.freed(seq_id, state, retain=retain, tail=tail)

    def swap_out(self, seq_ids: Sequence[int]) -> None:
        """Move a family to the host: each of its blocks once, sharing preserved (M8).

        What is published stays so, on both tiers, until it is evicted. Until it comes back, a sequence can only be
        freed.

        Args:
            seq_ids: live sequences, all of whose slots are computed.

        Raises:
            ValueError: one is swapped out, is named twice or has unwritten slots; or `can_swap_out` does not say OK.
        """
        swap.swap_out(self.tables, seq_ids)

    def swap_in(self, seq_ids: Sequence[int]) -> None:
        """Bring sequences back that are swapped out; what is published on the device is taken from there.

        Raises:
            ValueError: one is not swapped out or is named twice, or the device has no room for them.
        """
        swap.swap_in(self.tables, seq_ids, self.windowed_groups)

    def reset_prefix_cache(self) -> None:
        """Unpublish all blocks, also while sequences run; idle blocks are free at once.

        Live sequences keep their blocks and stop publishing, since their later blocks depend on the earlier ones. Pins
        are removed, too.
        """
        self.tables.unpublish_all()
        self.tree.clear()
        if self.archive is not None:
            self.archive.forget_saves()
        self.pins.clear()
        if self.tables.observer is not None:
            self.tables.observer.was_reset()

    def pin(self, name: str, chain: TokenChain) -> int:
        """Hold the longest published prefix of whole blocks of a chain until `unpin`; it may have all tokens.

        Returns:
            The tokens that are pinned; 0, and nothing changed, when there are none or `pin_limit` allows no more.

        Raises:
            ValueError: the name is in use.
        """
        num_tokens = self.pins.pin(name, self.groups, chain)
        if num_tokens:
            self.tables.version += 1
            if self.tables.observer is not None:
                self.tables.observer.pinned(name, chain, num_tokens)
        return num_tokens

    def unpin(self, name: str) -> None:
        """Let go of a pinned prefix: its blocks are idle again when no sequence holds them."""
        self.pins.remove(name)
        self.tables.version += 1
        if self.tables.observer is not None:
            self.tables.observer.unpinned(name)

    def take_ops(self) -> MemoryOps:
        """Hand over the movements that the workers must make before this step's kernels."""
        copies, self.tables.pending_copies = tuple(self.tables.pending_copies), []
        saves = () if self.archive is None else self.archive.take_saves()
        ops = MemoryOps(copies, saves) if copies else NO_OPS
        if self.tables.observer is not None:
            self.tables.observer.ops_taken(ops)
        return ops

    def take_table_deltas(self, seq_ids: Iterable[int]) -> list[tuple[TableDelta, ...]]:
        """Hand over, for each of some sequences, the table entries that changed since the last call for it."""
        seq_ids = tuple(seq_ids)
        states = map(self.sequences.__getitem__, seq_ids)
        deltas = [_take_deltas(state) if state.is_dirty else () for state in states]
        if self.tables.observer is not None:
            self.tables.observer.deltas_taken(seq_ids, deltas)
        return deltas


def _take_deltas(state: SequenceBlocks) -> tuple[TableDelta, ...]:
    state.is_dirty = False
    if len(state.tables) == 1:
        (table,), (start,) = state.tables, state.dirty_from
        state.dirty_from[0] = len(table)
        return (TableDelta(0, start, tuple(table[start:])),)
    starts, state.dirty_from = state.dirty_from, list(map(len, state.tables))
    changed = zip(starts, state.tables, strict=True)
    return tuple(TableDelta(idx, start, tuple(table[start:])) for idx, (start, table) in enumerate(changed))
