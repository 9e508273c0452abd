"""The KV cache manager: block tables over shared, forked, published and evicted blocks.

It knows ids, tokens and counts; it moves no bytes. Questions (`match_prefix`, `can_*`, `usage`) never change
anything; commands happen wholly or not at all (M7), and the same commands always give the same ids (M10).

```
 tokens   |<-- hit -->|<-- computed -->|<-- slots reserved, KV not written -->|
 blocks   [ shared   ][ shared ][ own  ][ own ][ new ][ new ]
                      num_published     num_computed           num_slots
```

Owner: one thread, the one that steps the engine. Nothing in here locks.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.chain import Namespace, TokenChain
from quire.memory.eviction import EVICTION_POLICIES
from quire.memory.groups import CacheGroup, find_prefix
from quire.memory.ops import NO_OPS, BlockCopy, MemoryOps, TableDelta
from quire.memory.pool import NULL_BLOCK, BlockPool
from quire.memory.sequence_memory import SequenceMemory
from quire.memory.specs import IMMORTAL, KVCacheSpec
from quire.memory.status import AllocStatus, HitEnd, PrefixHit, Usage, Verdict


class KVCacheManager:
    """Owns every block of the KV cache.

    Args:
        specs: one for each cache group; all with the same block size.
        num_blocks: usable blocks of each group.
        watermark: blocks of each group that an admission leaves free while other sequences live.
        enable_prefix_caching: publish full blocks and find them again.
        eviction: a name in `EVICTION_POLICIES`.
        key: a secret for the digests, at most 64 bytes.

    Invariants: M1 to M11, checked by `quire.memory.invariants.check`.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_blocks: int,
        *,
        watermark: int = 0,
        enable_prefix_caching: bool = True,
        eviction: str = "lru",
        key: bytes = b"",
    ) -> None:
        sizes = {spec.block_size for spec in specs}
        if len(sizes) != 1:
            raise ValueError(f"cache groups must share one block size, got {sorted(sizes)}")
        self.block_size = sizes.pop()
        policy = EVICTION_POLICIES[eviction]
        self.groups = tuple(CacheGroup(spec, BlockPool(num_blocks, policy())) for spec in specs)
        self.num_blocks = num_blocks
        self.watermark = watermark
        self.enable_prefix_caching = enable_prefix_caching
        self.sequences: dict[int, SequenceMemory] = {}
        self._key = key
        self._mortal = tuple(idx for idx, spec in enumerate(specs) if spec.death(0) < IMMORTAL)
        self.pending_copies: list[BlockCopy] = []
        self._version = 0
        self._num_copies = 0
        self._num_merges = 0

    # ---- questions ----

    def chain(self, tokens: list[int], namespace: Namespace) -> TokenChain:
        """Return a chain over `tokens` for the other verbs; see `TokenChain` for who owns the list."""
        return TokenChain(tokens, namespace, self.block_size, self._key)

    def match_prefix(self, chain: TokenChain, max_tokens: int | None = None) -> PrefixHit:
        """Find the longest usable published prefix, over all groups.

        Args:
            chain: the sequence's tokens; at least one of them is left to compute.
            max_tokens: reuse at most so many tokens (prompt log probabilities need the logits of the rest).
        """
        if not self.enable_prefix_caching:
            return PrefixHit(0, ((),) * len(self.groups), HitEnd.DISABLED, None, self._version)
        return find_prefix(self.groups, chain, max_tokens, self._version)

    def can_allocate(
        self, num_tokens: int, hit: PrefixHit, step_tokens: int | None = None, reserved: Sequence[int] = ()
    ) -> AllocStatus:
        """Say whether a new sequence of `num_tokens` tokens can be opened on a hit and grow to that length.

        While other sequences live, `watermark` blocks and the `reserved` ones must stay free for their growth;
        alone, a sequence may take everything, so that nothing that fits waits for ever.

        Args:
            num_tokens: tokens to hold, those of the hit included.
            hit: the prefix to open on.
            step_tokens: the most tokens that will be appended at once, None for all: what dies between the steps of
                a prompt makes room for the next.
            reserved: blocks of each group that sequences already let in will still ask for.
        """
        tightest: AllocStatus | None = None
        for idx, (group, shared) in enumerate(zip(self.groups, hit.block_ids, strict=True)):
            pool, spec = group.pool, group.spec
            least = spec.peak_blocks(num_tokens, 1)
            if least > pool.num_blocks:
                return AllocStatus(Verdict.NEVER, idx, least, pool.num_blocks)
            spare = 0
            if self.sequences:
                spare = self.watermark + (reserved[idx] if reserved else 0)
            # Idle blocks of the hit are available in the pool, but cannot be had twice.
            num_idle = sum(pool.ref_counts[block_id] == 0 for block_id in shared if block_id != NULL_BLOCK)
            peak = spec.peak_blocks(num_tokens, step_tokens or num_tokens)
            num_new = min(peak - num_idle, spec.num_blocks(num_tokens) - len(shared))
            needed, available = num_new + spare, pool.num_available - num_idle
            verdict = Verdict.OK if needed <= available else Verdict.LATER
            if tightest is None or available - needed < tightest.available - tightest.needed:
                tightest = AllocStatus(verdict, idx, needed, available)
        assert tightest is not None
        return tightest

    def blocks_missing(self, seq_id: int, num_tokens: int, step_tokens: int | None = None) -> tuple[int, ...]:
        """Return the blocks of each group that a live sequence will still ask for on its way to `num_tokens` tokens.

        Args:
            seq_id: a live sequence.
            num_tokens: where it goes.
            step_tokens: see `can_allocate`.
        """
        state = self.sequences[seq_id]
        missing = []
        for group, table, num_dead in zip(self.groups, state.tables, state.num_dead, strict=True):
            peak = group.spec.peak_blocks(num_tokens, step_tokens or num_tokens)
            fresh = group.spec.num_blocks(num_tokens) - len(table)
            missing.append(max(0, min(fresh, peak - (len(table) - num_dead))))
        return tuple(missing)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Say whether a sequence of `num_tokens` tokens could be held at all, by itself and in the shortest steps."""
        nothing = PrefixHit(0, ((),) * len(self.groups), HitEnd.DISABLED, None, self._version)
        return self.can_allocate(num_tokens, nothing, 1).verdict is not Verdict.NEVER

    def rollback_limit(self, seq_id: int) -> int:
        """Return the least length to which a live sequence can be truncated: before it, live tokens would be gone."""
        state = self.sequences[seq_id]
        return max(
            (self.groups[idx].spec.death(state.num_dead[idx] - 1) for idx in self._mortal if state.num_dead[idx]),
            default=0,
        )

    def block_table(self, seq_id: int, group_idx: int = 0) -> tuple[int, ...]:
        """Return a live sequence's block ids in one cache group."""
        return tuple(self.sequences[seq_id].tables[group_idx])

    def usage(self) -> Usage:
        """Return block counts, summed over the groups, and counters since the start."""
        pools = [group.pool for group in self.groups]
        num_blocks = sum(pool.num_blocks for pool in pools)
        idle = sum(len(pool.idle) for pool in pools)
        free = sum(pool.num_free for pool in pools)
        return Usage(
            num_blocks=num_blocks,
            used=num_blocks - idle - free,
            idle=idle,
            free=free,
            num_sequences=len(self.sequences),
            num_tokens=sum(state.num_slots for state in tuple(self.sequences.values())),
            num_evictions=sum(pool.num_evictions for pool in pools),
            num_copies=self._num_copies,
            num_merges=self._num_merges,
        )

    # ---- commands ----

    def allocate(self, seq_id: int, chain: TokenChain, hit: PrefixHit) -> None:
        """Open a sequence on a hit: its slots are those of the hit, all computed.

        Raises:
            ValueError: the sequence is live already, or the hit is older than another command.
        """
        if seq_id in self.sequences:
            raise ValueError(f"sequence {seq_id} is live already")
        if hit.version != self._version:
            raise ValueError("stale prefix hit: another command came between match_prefix and allocate")
        self._version += 1
        state = SequenceMemory(chain, len(self.groups))
        for idx, (group, shared) in enumerate(zip(self.groups, hit.block_ids, strict=True)):
            num_dead = state.num_dead[idx] = group.num_dead(hit.num_tokens)
            group.pool.retain(shared[num_dead:])
            state.tables[idx] = list(shared)
        state.num_slots = state.num_computed = hit.num_tokens
        state.num_published = hit.num_tokens // self.block_size
        state.next_event = self._next_event(state)
        self.sequences[seq_id] = state

    def append_slots(self, seq_id: int, num_tokens: int, lookahead: int = 0) -> bool:
        """Give a sequence slots for `num_tokens` more tokens in every group, or change nothing.

        Before the tail block is written (M3), it is copied where it is shared; where this sequence is its last
        holder and it is published (after `truncate`), it leaves the prefix index instead.

        Args:
            seq_id: a live sequence.
            num_tokens: tokens that will be computed.
            lookahead: further tokens, of which verification may reject some; `truncate` takes their slots back.

        Returns:
            False when some group lacks the blocks.

        Raises:
            ValueError: fewer than one token, or a negative lookahead.
        """
        state = self.sequences[seq_id]
        if num_tokens < 1 or lookahead < 0:
            raise ValueError(f"cannot append {num_tokens} slots and {lookahead} to look ahead")
        num_tokens += lookahead
        start = state.num_slots
        end = start + num_tokens
        tail, offset = divmod(start, self.block_size)
        if 0 < offset <= self.block_size - num_tokens and state.has_exclusive_tail:
            state.num_slots = end
            return True
        wanted: list[tuple[int, bool]] = []
        has_work = False
        for group, table in zip(self.groups, state.tables, strict=True):
            pool = group.pool
            fresh = group.spec.num_blocks(end) - len(table)
            must_copy = offset > 0 and pool.ref_counts[table[tail]] > 1
            if fresh or must_copy:
                has_work = True
                if fresh + must_copy > pool.num_available:
                    return False
            wanted.append((fresh, must_copy))
        state.num_slots = end
        if offset and not state.has_exclusive_tail:
            self._withdraw(state, tail)
            state.has_exclusive_tail = True
        if has_work:
            self._version += 1
            for idx, (fresh, must_copy) in enumerate(wanted):
                if must_copy:
                    self._copy_on_write(state, idx, tail)
                if fresh:
                    table = state.tables[idx]
                    state.mark_dirty(idx, len(table))
                    table += self.groups[idx].pool.take(fresh)
        return True

    def fork(self, parent_id: int, child_id: int, child_tokens: list[int]) -> TokenChain:
        """Open a child that shares all of its parent's blocks; only reference counts change.

        Args:
            parent_id: a live sequence whose slots are all computed.
            child_id: the new sequence.
            child_tokens: the child's own list, starting with the parent's computed tokens.

        Returns:
            The child's chain.

        Raises:
            ValueError: the child is live already, or the parent has slots that are not written yet (both would
                write to them).
        """
        parent = self.sequences[parent_id]
        if child_id in self.sequences:
            raise ValueError(f"sequence {child_id} is live already")
        if parent.num_slots != parent.num_computed:
            raise ValueError(f"sequence {parent_id} has {parent.num_slots - parent.num_computed} unwritten slots")
        self._version += 1
        child = parent.fork(parent.chain.fork(child_tokens))
        # The parent's links may reach past what is computed; the child's tokens part from there.
        child.chain.truncate(parent.num_computed)
        for group, table, num_dead in zip(self.groups, parent.tables, parent.num_dead, strict=True):
            group.pool.retain(table[num_dead:])
        self.sequences[child_id] = child
        return child.chain

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Take back the slots from `num_tokens` on; the owner shortens the chain's tokens afterwards.

        Args:
            seq_id: a live sequence.
            num_tokens: slots to keep, at most those it has, and at least `rollback_limit`: dead blocks are gone.

        Raises:
            ValueError: more slots than there are, or fewer than the dead blocks allow.
        """
        state = self.sequences[seq_id]
        if not self.rollback_limit(seq_id) <= num_tokens <= state.num_slots:
            least = self.rollback_limit(seq_id)
            raise ValueError(f"cannot truncate to {num_tokens} tokens, only to [{least}, {state.num_slots}]")
        self._version += 1
        for idx, group in enumerate(self.groups):
            table = state.tables[idx]
            keep = group.spec.num_blocks(num_tokens)
            if keep < len(table):
                group.pool.release(reversed(table[keep:]))
                del table[keep:]
                state.mark_dirty(idx, keep)
        state.num_slots = num_tokens
        state.has_exclusive_tail = False
        state.num_computed = min(state.num_computed, num_tokens)
        state.num_published = min(state.num_published, num_tokens // self.block_size)
        state.next_event = self._next_event(state)
        state.chain.truncate(num_tokens)

    def publish(self, seq_id: int, num_computed: int) -> None:
        """Note that the KV of the first `num_computed` tokens is stored and verified; publish the full blocks.

        A block whose identity is published already is a duplicate: the table takes the published one, and the
        duplicate goes back. Blocks that no later token reads are dead: they go back, and the table has null entries
        in their place.

        Raises:
            ValueError: `num_computed` shrinks, or exceeds the slots or the tokens.
        """
        state = self.sequences[seq_id]
        most = min(state.num_slots, len(state.chain.tokens))
        if not state.num_computed <= num_computed <= most:
            raise ValueError(f"num_computed {num_computed} is not in [{state.num_computed}, {most}]")
        state.num_computed = num_computed
        if num_computed >= state.next_event:
            self._version += 1
            if self.enable_prefix_caching and state.is_publishing:
                self._publish_blocks(state, num_computed // self.block_size)
            for idx in self._mortal:
                self._bury(state, idx)
            state.next_event = self._next_event(state)

    def free(self, seq_id: int) -> None:
        """Release a sequence; of its published blocks the tail becomes evictable before the head."""
        state = self.sequences.pop(seq_id)
        self._version += 1
        for group, table, num_dead in zip(self.groups, state.tables, state.num_dead, strict=True):
            group.pool.release(reversed(table[num_dead:]))

    def take_ops(self) -> MemoryOps:
        """Hand over the movements that the workers must make before this step's kernels."""
        if not self.pending_copies:
            return NO_OPS
        ops = MemoryOps(tuple(self.pending_copies))
        self.pending_copies = []
        return ops

    def take_table_deltas(self, seq_id: int) -> tuple[TableDelta, ...]:
        """Hand over the table entries that changed since the last call for this sequence."""
        state = self.sequences[seq_id]
        if not state.is_dirty:
            return ()
        deltas = tuple(
            TableDelta(idx, start, tuple(table[start:]))
            for idx, (start, table) in enumerate(zip(state.dirty_from, state.tables, strict=True))
        )
        state.dirty_from = [len(table) for table in state.tables]
        state.is_dirty = False
        return deltas

    # ---- steps of commands ----

    def _withdraw(self, state: SequenceMemory, block_idx: int) -> None:
        """Take a block that is about to be written in place out of the prefix index."""
        for group, table in zip(self.groups, state.tables, strict=True):
            block_id = table[block_idx]
            if block_id in group.pool.index and group.pool.ref_counts[block_id] == 1:
                group.pool.index.remove(block_id)
                self._version += 1

    def _copy_on_write(self, state: SequenceMemory, group_idx: int, block_idx: int) -> None:
        """Replace a table entry by a private copy of its block."""
        pool = self.groups[group_idx].pool
        table = state.tables[group_idx]
        old = table[block_idx]
        # Take before release: the copy must not be made onto its own source.
        (new,) = pool.take(1)
        table[block_idx] = new
        pool.release((old,))
        state.mark_dirty(group_idx, block_idx)
        self.pending_copies.append(BlockCopy(group_idx, old, new))
        self._num_copies += 1

    def _publish_blocks(self, state: SequenceMemory, num_full: int) -> None:
        """Publish or merge the blocks `[num_published, num_full)` of a sequence."""
        chain = state.chain
        links = chain.links(num_full)
        for i in range(state.num_published, num_full):
            found = [group.pool.index.get(links[i][0]) for group in self.groups]
            if any(entry is not None and not chain.recognises(i, entry[1]) for entry in found):
                # A collision: identities of later blocks would chain from an ambiguous parent.
                state.is_publishing = False
                return
            link = chain.canonical_link(i)
            for group_idx, (group, entry) in enumerate(zip(self.groups, found, strict=True)):
                table = state.tables[group_idx]
                if entry is None:
                    group.pool.index.add(link, table[i])
                else:
                    group.pool.retain(entry[:1])
                    group.pool.release((table[i],))
                    table[i] = entry[0]
                    state.mark_dirty(group_idx, i)
                    self._num_merges += 1
            state.num_published = i + 1

    def _bury(self, state: SequenceMemory, group_idx: int) -> None:
        """Give the blocks back that have died, and put null entries in their place."""
        group, table = self.groups[group_idx], state.tables[group_idx]
        old, new = state.num_dead[group_idx], group.num_dead(state.num_computed)
        if old < new:
            group.pool.release(table[old:new])
            table[old:new] = [NULL_BLOCK] * (new - old)
            state.num_dead[group_idx] = new
            state.mark_dirty(group_idx, old)

    def _next_event(self, state: SequenceMemory) -> int:
        """Return the least number of computed tokens at which `publish` has more to do than to count."""
        event = IMMORTAL
        if self.enable_prefix_caching and state.is_publishing:
            event = (state.num_published + 1) * self.block_size
        for idx in self._mortal:
            event = min(event, self.groups[idx].spec.death(state.num_dead[idx]))
        return event
