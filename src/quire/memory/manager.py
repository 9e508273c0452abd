"""The KV cache manager: block tables over shared, forked, published and evicted blocks.

It handles block ids, tokens and counts; it moves no bytes. Queries (`match_prefix`, `capacity`, `usage`) may cache (a
match keeps the encoded tokens and a cursor in the chain), but change no block and no later answer. Commands are atomic
(M7) and deterministic: the same commands always give the same block ids (M10).

```
 tokens   |<-- hit -->|<-- computed -->|<-- slots reserved, KV not written -->|
 blocks   [ shared   ][ shared ][ own  ][ own ][ new ][ new ]
                      num_published     num_computed           num_slots
```

Owner: the thread that steps the engine. There are no locks.
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
        specs: spec of each cache group; all with the same block size.
        num_blocks: number of usable blocks. Several groups with blocks of the same bytes share a pool of this number
            times the number of groups. Or:
        num_bytes: bytes of the memory that all groups share, the null block included.
        watermark: slabs (with one group: blocks) that an admission leaves free while other sequences live.
        enable_prefix_caching: True to publish full blocks in the prefix index, where later sequences hit them.
        eviction: a name in `EVICTION_POLICIES`.
        pin_limit: slabs (with one group: blocks) that pinned prefixes may fill; capacity checks leave them out.
        snapshot_interval: number of tokens between state snapshots of recurrent groups, a multiple of the block size.
        host_bytes: bytes of the host tier, its null block included; 0 for no host tier.
        retention_limit: slabs (with one group: blocks) whose bytes retained blocks, which are evicted last, may fill.
        has_disk: True to save blocks to disk that the host tier evicts; see `archive`.
        key: secret for the digests, at most 64 bytes.

    Attributes:
        capacity: queries about available memory.
        rollback: queries about how far a sequence can be truncated.
        pins: pinned prefixes.
        archive: commands of the disk tier; None without a disk tier.
        lost_copies: commands that unpublish the targets of a failed step's copies.
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
        # All token groups publish the same tree positions: one pool's index is enough to record their children.
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
        """Return a chain over `tokens` for the other methods; see `TokenChain` for the ownership of the list."""
        return TokenChain(tokens, root_of(namespace, self._key), self.block_size, media)

    def match_prefix(self, chain: TokenChain, max_tokens: int | None = None) -> PrefixHit:
        """Find the longest prefix cache hit over all groups and tiers: whole blocks, and part of one more.

        Args:
            chain: the sequence's tokens; the hit leaves at least one of them to compute.
            max_tokens: maximum number of tokens of the hit (prompt log probabilities need the logits of the rest).
        """
        if not self.enable_prefix_caching:
            return PrefixHit(0, ((),) * len(self.groups), HitEnd.LIMIT, None, self.tables.version)
        host_groups = self.host.groups if self.host is not None else ()
        keeps_all = not (self.windowed_groups or self.tables.recurrent_groups)
        return find_hit(self.groups, chain, max_tokens, self.tables.version, host_groups, keeps_all=keeps_all)

    def step_limit(self, seq_id: int, num_tokens: int) -> int:
        """Return how many of a live sequence's next tokens may be computed in one step.

        With recurrent groups, a step ends at the next snapshot point at the latest; otherwise it may have all tokens.

        Args:
            seq_id: a live sequence.
            num_tokens: number of tokens after those that have slots.
        """
        return self._publication.step_limit(self.sequences[seq_id], num_tokens)

    def is_snapshot_pending(self, seq_id: int) -> bool:
        """Return whether a snapshot of a live sequence's states is due before a step extends its present slots."""
        return self._publication.is_snapshot_pending(self.sequences[seq_id])

    def block_table(self, seq_id: int, group_idx: int = 0) -> tuple[int, ...]:
        """Return a live sequence's block ids in one cache group."""
        return tuple(self.sequences[seq_id].tables[group_idx])

    def usage(self) -> Usage:
        """Return block counts, in total and by group, and counters since the start."""
        return measure(self.tables, self._publication.num_merges)

    # ---- commands ----

    def allocate(self, seq_id: int, chain: TokenChain, hit: PrefixHit) -> None:
        """Open a sequence with the slots of a hit, all computed; blocks on the host are copied to the device.

        The chain's tokens at this moment are its prompt: a snapshot of states is taken close to their end.

        A block that the hit uses in part is shared like the others; `append_slots` copies it on write.

        Raises:
            ValueError: the sequence is already live, a command ran after `match_prefix`, or the device has no room for
                the blocks to load from the host, which `can_allocate` counts.
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
        """Give sequences, one after the other, slots for more tokens in every group, up to the first without room.

        Before the tail block is written (M3), it is copied if it is shared (copy-on-write); if this sequence is its
        last holder and it is published (after `truncate`), it is unpublished instead. Every step overwrites the
        recurrent states; with a lookahead the present states are kept as a backup, which takes one more block each.

        Args:
            seq_ids: live sequences on the device, all different.
            num_tokens: number of tokens of each sequence that will be computed.
            lookahead: number of further slots, for draft tokens that may be rejected; `truncate` takes them back.
            atomic: True to give one slot to all sequences or to none of them; none may have lookahead slots.

        Returns:
            Number of leading sequences of `seq_ids` that got their slots. The others are unchanged.

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
            child_id: id of the new sequence.
            child_tokens: the child's own list (not the parent's), starting with the parent's computed tokens.

        Returns:
            The child's chain.

        Raises:
            ValueError: the child is already live, the parent is swapped out, or the parent has unwritten slots (both
                sequences would write to them).
        """
        child = self.tables.fork(parent_id, child_id, child_tokens)
        if self.tables.observer is not None:
            self.tables.observer.forked(parent_id, child_id, child.num_slots)
        return child.chain

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Remove the slots from `num_tokens` on; the owner shortens the chain's tokens afterwards.

        Args:
            seq_id: a live sequence on the device.
            num_tokens: number of slots to keep, from `rollback.limit` to the present number. With recurrent groups,
                only one of these two, since no state was stored for lengths between them.

        Raises:
            ValueError: a number of slots that is not allowed, or the sequence is swapped out.
        """
        self.rollback.truncate(seq_id, num_tokens)

    def publish(self, seq_id: int, num_computed: int) -> None:
        """Record that the KV of the first `num_computed` tokens is stored and verified; publish the full blocks.

        A block whose tokens are already published is a duplicate: the block table takes the published block, and the
        duplicate is released. Blocks out of the window are also released, and replaced by null entries. States are
        published if a snapshot is due and all slots are computed.

        Raises:
            ValueError: `num_computed` shrinks, or exceeds the slots or the tokens; the sequence has recurrent states
                with lookahead slots, and not all slots are computed; or the sequence is swapped out.
        """
        self.publish_each({seq_id: num_computed})

    def publish_each(self, num_computed: Mapping[int, int]) -> None:
        """Publish several sequences, given the number of computed tokens of each; see `publish`."""
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
        """Publish distinct sequences after one more token was computed for each; see `publish`."""
        self.publish_each(self._publication.add_computed(seq_ids))

    def free(self, seq_id: int, *, retain: bool = False, is_sound: bool = True) -> None:
        """Release a sequence's blocks; the tail of its published blocks is evicted before the head.

        Its partly filled last block is also published, as a tail, unless a published block already has its tokens.

        Args:
            seq_id: a live sequence.
            retain: True to evict its published blocks after all blocks that are not retained, within `retention_limit`.
            is_sound: False if no later turn continues the tokens, or if requested block copies may not have been made.
        """
        state = self.sequences.pop(seq_id)
        self.tables.version += 1
        state.is_publishing &= is_sound
        if self.archive is not None:
            self.archive.note_end(state)
        tail = self._publication.end(state) if is_sound and not state.is_swapped else None
        if retain:
            self.arena.evict_last(state.tables)
        self.tables.release(state)
        if self.host is not None and state.is_swapped:
            self.host.num_sequences -= 1
            swap.release_tier(self.tables, state, Tier.HOST)
        if self.tables.observer is not None:
            self.tables.observer.freed(seq_id, state, retain=retain, is_sound=is_sound, tail=tail)

    def swap_out(self, seq_ids: Sequence[int]) -> None:
        """Swap sequences out to the host: each block is copied once, and stays shared among them (M8).

        Published blocks stay published, on both tiers, until they are evicted. A swapped-out sequence can only be
        swapped in or freed.

        Args:
            seq_ids: live sequences without unwritten slots.

        Raises:
            ValueError: a sequence is swapped out, named twice or has unwritten slots; or `can_swap_out` is not OK.
        """
        swap.swap_out(self.tables, seq_ids)

    def swap_in(self, seq_ids: Sequence[int]) -> None:
        """Swap sequences in from the host; blocks that are still published on the device are shared, not copied.

        Raises:
            ValueError: a sequence is not swapped out or is named twice, or the device has no room for them.
        """
        swap.swap_in(self.tables, seq_ids, self.windowed_groups)

    def reset_prefix_cache(self) -> None:
        """Unpublish all blocks, also while sequences run; idle blocks are free at once.

        Live sequences keep their blocks and stop publishing, since their later blocks depend on the earlier ones. Pins
        are also removed.
        """
        self.tables.unpublish_all()
        self.tree.clear()
        if self.archive is not None:
            self.archive.forget_saves()
        self.pins.clear()
        if self.tables.observer is not None:
            self.tables.observer.was_reset()

    def pin(self, name: str, chain: TokenChain) -> int:
        """Hold the longest published prefix of whole blocks of a chain until `unpin`; it may include the last token.

        Returns:
            The number of pinned tokens; 0, with nothing changed, if there are none or `pin_limit` would be exceeded.

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
        """Release a pinned prefix: its blocks become idle when no sequence holds them."""
        self.pins.remove(name)
        self.tables.version += 1
        if self.tables.observer is not None:
            self.tables.observer.unpinned(name)

    def take_ops(self) -> MemoryOps:
        """Return and clear the block copies and saves that the workers must make before this step's kernels."""
        copies, self.tables.pending_copies = tuple(self.tables.pending_copies), []
        saves = () if self.archive is None else self.archive.take_saves()
        ops = MemoryOps(copies, saves) if copies else NO_OPS
        if self.tables.observer is not None:
            self.tables.observer.ops_taken(ops)
        return ops

    def take_table_deltas(self, seq_ids: Iterable[int]) -> list[tuple[TableDelta, ...]]:
        """Return for each sequence the block table entries that changed since the last call for that sequence."""
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
