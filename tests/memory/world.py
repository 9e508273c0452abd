"""A small world: the manager, its slow twin, a worker's tables and what is stored, all moved by the same commands.

Every command is followed by `verify`: the numbered invariants, agreement with the twin, and reading every sequence back
through its table. What is stored at a slot is the whole prefix that its KV depends on, so that a block that was shared,
copied, merged, evicted or reused wrongly cannot read back right by luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

from quire.memory import (
    AllocStatus,
    BlockCopy,
    ChunkedLocal,
    FullAttention,
    KVCacheManager,
    KVCacheSpec,
    Namespace,
    PrefixHit,
    SlidingWindow,
    Tier,
    TokenChain,
    Verdict,
    check,
)
from quire.memory.invariants import snapshot
from tests.memory.disk import Disk
from tests.memory.host_twin import HostTwin
from tests.memory.host_world import compare_hosts, verify_host_index
from tests.memory.twin import Kind, Page, Pages, Twin

# What a slot's KV depends on: the namespace and all tokens up to its own; None before anything is written.
Content = tuple[Namespace, tuple[int, ...]] | None

# A block of a tier.
Place = tuple[Tier, int]

NAMESPACES = (Namespace(), Namespace(cache_salt="tenant"))


class WorldSize(NamedTuple):
    """How small a world is.

    Args:
        num_blocks: of each cache group.
        block_size: tokens of a block.
        watermark: blocks left free at admission.
        caching: whether blocks are published.
        kinds: of the cache groups.
        layers: of each group, when their blocks are to be of different sizes.
        num_bytes: of the arena, then; `num_blocks` has no meaning.
        eviction: the policy; the twin knows the first only.
        host_blocks: of the host tier, shared by the groups, when their blocks are of one size; or
        host_bytes: of the host tier.
        has_disk: what the host evicts is saved, and can be loaded.
    """

    num_blocks: int
    block_size: int
    watermark: int = 0
    caching: bool = True
    kinds: tuple[Kind, ...] = (Kind(),)
    layers: tuple[int, ...] = ()
    num_bytes: int | None = None
    eviction: str = "lru"
    host_blocks: int = 0
    host_bytes: int = 0
    has_disk: bool = False


def spec_of(kind: Kind, block_size: int, num_layers: int = 1) -> KVCacheSpec:
    """Return the spec of a cache group, with two bytes for a token in a layer."""
    if kind.name == "window":
        return SlidingWindow(block_size=block_size, num_layers=num_layers, element_bytes=1, window=kind.extent)
    if kind.name == "chunk":
        return ChunkedLocal(block_size=block_size, num_layers=num_layers, element_bytes=1, chunk=kind.extent)
    return FullAttention(block_size=block_size, num_layers=num_layers, element_bytes=1)


class World:
    """Commands for a manager, with everything checked after each.

    Args:
        size: how small it is.
        has_twin: False where digests collide: the twin knows no digests, so it cannot tell which hits are missed.
    """

    def __init__(self, size: WorldSize, *, has_twin: bool = True) -> None:
        self.size = size
        specs = [
            spec_of(kind, size.block_size, num_layers)
            for kind, num_layers in zip(size.kinds, size.layers or (1,) * len(size.kinds), strict=True)
        ]
        self.manager = KVCacheManager(
            specs,
            None if size.num_bytes else size.num_blocks,
            num_bytes=size.num_bytes,
            watermark=size.watermark,
            enable_prefix_caching=size.caching,
            eviction=size.eviction,
            host_bytes=size.host_bytes or (size.host_blocks and (size.host_blocks + 1) * specs[0].bytes_per_block),
            has_disk=size.has_disk,
        )
        self.disk = None if self.manager.archive is None else Disk(self, self.manager.archive)
        self.twin = Twin(size.num_blocks, size.block_size, size.kinds, watermark=size.watermark, caching=size.caching)
        if size.host_blocks:
            self.twin.host = HostTwin(self.twin, size.host_blocks)
        self.has_twin = has_twin
        self.has_host = self.manager.host is not None
        self.tokens: dict[int, list[int]] = {}
        self.chains: dict[int, TokenChain] = {}
        self.namespaces: dict[int, Namespace] = {}
        self.worker_tables: dict[int, list[list[int]]] = {}
        self.pending: list[BlockCopy] = []
        # By byte of each tier's arena: groups see the same bytes.
        self.stored: dict[Tier, dict[int, Content]] = {tier: {} for tier in Tier}
        self.block_of: dict[Page, int] = {}

    # ---- what a driver may ask ----

    def num_slots(self, seq_id: int) -> int:
        """Return the slots of a sequence."""
        return self.manager.sequences[seq_id].num_slots

    def num_computed(self, seq_id: int) -> int:
        """Return the stored tokens of a sequence."""
        return self.manager.sequences[seq_id].num_computed

    def is_swapped(self, seq_id: int) -> bool:
        """Say whether a sequence is swapped out."""
        return self.manager.sequences[seq_id].is_swapped

    # ---- commands ----

    def open(
        self,
        seq_id: int,
        tokens: list[int],
        namespace: Namespace = NAMESPACES[0],
        *,
        max_tokens: int | None = None,
        reserved: int = 0,
        step: int | None = None,
    ) -> AllocStatus:
        """Ask for a hit and for room, compare the answers, and open the sequence unless it can never fit."""
        manager, twin = self.manager, self.twin
        before = snapshot(manager)
        chain = manager.chain(tokens, namespace)
        hit = manager.match_prefix(chain, max_tokens)
        status = manager.can_allocate(len(tokens), hit, step, (reserved,) * len(self.size.kinds))
        assert snapshot(manager) == before, "a question changed the manager"
        assert hit.num_tokens < len(tokens), "a hit covers the whole prompt"
        assert max_tokens is None or hit.num_tokens <= max_tokens
        prefixes = self.prefixes(namespace, tokens, hit.num_tokens)
        places = [[(Tier.DEVICE, block_id) for block_id in blocks] for blocks in hit.block_ids]
        for group_idx, block_idx, host_id in hit.loads:
            places[group_idx][block_idx] = (Tier.HOST, host_id)
        for group_idx, blocks in enumerate(places):
            self._reads_back(group_idx, blocks, prefixes, hit.num_tokens)
        if self.has_twin:
            pages = twin.match(namespace, tokens, max_tokens)
            found = [
                [(Tier(twin.is_on_host(idx, page)), self.block_of[page] if page else 0) for page in group]
                for idx, group in enumerate(pages)
            ]
            assert found == places, "the twin found another hit"
            self._compare_verdict(status, len(tokens), pages, step or len(tokens), reserved)
        if status.verdict is Verdict.LATER and not self._can_load(hit):
            self.refuses(ValueError, lambda: manager.allocate(seq_id, chain, hit))
        elif status.verdict is not Verdict.NEVER:
            manager.allocate(seq_id, chain, hit)
            self._adopt(seq_id, chain, namespace)
            if self.has_twin:
                twin.open(seq_id, namespace, tokens, pages)
        self.verify()
        return status

    def _can_load(self, hit: PrefixHit) -> bool:
        """Say whether the device has room for the blocks of a hit that have no holders there."""
        needs = [0] * len(self.size.kinds)
        for load in hit.loads:
            needs[load.group_idx] += 1
        for idx, blocks in enumerate(hit.block_ids):
            ref_counts = self.manager.groups[idx].pool.ref_counts
            needs[idx] += sum(block_id != 0 and ref_counts[block_id] == 0 for block_id in blocks)
        return not hit.loads or self.manager.arena.can_hold(needs)

    def _compare_verdict(
        self, status: AllocStatus, num_tokens: int, hit: list[Pages], step: int, reserved: int
    ) -> None:
        twin = self.twin
        groups = range(len(self.size.kinds))
        if twin.joint_peak(num_tokens) > twin.num_pages:
            assert status.verdict is Verdict.NEVER, "NEVER was not said"
            assert status.needed > status.available
            return
        assert status.verdict is not Verdict.NEVER, "NEVER was said though it fits"
        num_swapped = 0 if twin.host is None else len(twin.host.tables)
        spare = self.size.watermark + reserved if len(twin.sequences) > num_swapped else 0
        margin, is_exact = twin.num_available(), True
        for idx in groups:
            margin -= twin.least_needed(idx, num_tokens, hit[idx], step) + spare
            margin -= sum(page in twin.groups[idx].idle for page in hit[idx])
            is_exact &= not hit[idx] or self.size.kinds[idx].name == "full"
        # With a hit of a window the closed form may ask for more than is needed, never for less.
        assert status.available - status.needed <= margin
        assert status.available - status.needed == margin or not is_exact
        assert (status.verdict is Verdict.OK) == (status.needed <= status.available)

    def enter(self, seq_id: int, tokens: list[int], namespace: Namespace = NAMESPACES[0]) -> bool:
        """Open, get slots for and store a whole prompt; False, and nothing changed, when memory says no."""
        status = self.open(seq_id, tokens, namespace)
        if seq_id not in self.tokens:
            assert status.verdict is not Verdict.OK
            return False
        is_granted = self.grow(seq_id, len(tokens) - self.num_computed(seq_id))
        if status.verdict is Verdict.OK:
            assert is_granted, "can_allocate promised what append_slots refuses"
        if is_granted:
            self.store(seq_id, len(tokens) - self.num_computed(seq_id))
        else:
            self.free(seq_id)
        return is_granted

    def grow(self, seq_id: int, num_tokens: int) -> bool:
        """Ask for slots."""
        before = snapshot(self.manager)
        is_granted = self.manager.append_slots(seq_id, num_tokens)
        if not is_granted:
            assert snapshot(self.manager) == before, "a refused command changed the manager"
        if self.has_twin:
            assert is_granted == self.twin.append(seq_id, num_tokens), "the twin decides otherwise"
        self.verify()
        return is_granted

    def store(self, seq_id: int, num_tokens: int) -> None:
        """Run one step of a worker for one sequence: copies first, then the tokens' KV, then publish."""
        self.perform_copies()
        self.sync(seq_id)
        start = self.num_computed(seq_id)
        end = start + num_tokens
        prefixes = self.prefixes(self.namespaces[seq_id], self.tokens[seq_id], end)
        for group_idx, table in enumerate(self.worker_tables[seq_id]):
            for position in range(start, end):
                block_idx, offset = divmod(position, self.size.block_size)
                assert table[block_idx] != 0, "the null block is written"
                for byte in self.bytes_of(group_idx, table[block_idx], offset):
                    self.stored[Tier.DEVICE][byte] = prefixes[position]
            for position in range(start, end):
                self._reads_back(group_idx, [(Tier.DEVICE, block_id) for block_id in table], prefixes, position)
        self.manager.publish(seq_id, end)
        if self.has_twin:
            self.twin.store(seq_id, end)
        self.verify()

    def fork(self, parent_id: int, child_id: int, new_tokens: list[int]) -> None:
        """Fork a sequence; the child goes on with other tokens."""
        tokens = self.tokens[parent_id][: self.num_computed(parent_id)] + new_tokens
        chain = self.manager.fork(parent_id, child_id, tokens)
        assert chain.tokens is tokens
        self._adopt(child_id, chain, self.namespaces[parent_id])
        if self.has_twin:
            self.twin.fork(parent_id, child_id, tokens)
        self.verify()

    def truncate(self, seq_id: int, num_tokens: int, *, keep_tokens: bool = False) -> None:
        """Roll a sequence back; its tokens stay known where they are only to be computed again."""
        assert not self.has_twin or self.twin.can_truncate(seq_id, num_tokens)
        self.manager.truncate(seq_id, num_tokens)
        if not keep_tokens:
            del self.tokens[seq_id][num_tokens:]
        if self.has_twin:
            self.twin.truncate(seq_id, num_tokens)
        self.verify()

    def free(self, seq_id: int) -> None:
        """Release a sequence."""
        self.manager.free(seq_id)
        del self.tokens[seq_id], self.chains[seq_id], self.namespaces[seq_id], self.worker_tables[seq_id]
        if self.has_twin:
            self.twin.free(seq_id)
        self.verify()

    def evict(self, group_idx: int, block_id: int) -> None:
        """Evict an idle block out of turn; the twin does not know."""
        loan, pool = self.manager.arena.loans[group_idx], self.manager.groups[group_idx].pool
        assert self.manager.arena.layout.blocks_per_slab[group_idx] == 1
        if pool.lender is None:
            pool.free.append(pool.evict(block_id))
        else:
            loan._evict(block_id)
            loan._give_back([loan._slab_of(block_id)])

    def reset(self) -> None:
        """Forget all that is published."""
        self.manager.reset_prefix_cache()
        if self.has_twin:
            self.twin.reset()
        self.verify()

    def sync(self, seq_id: int) -> None:
        """Replay table changes on the worker's side; afterwards both sides agree."""
        tables = self.worker_tables[seq_id]
        for delta in self.manager.take_table_deltas(seq_id):
            tables[delta.group_idx][delta.start :] = delta.block_ids
        for group_idx, table in enumerate(tables):
            assert tuple(table) == self.manager.block_table(seq_id, group_idx), "the worker's table differs"
        assert self.manager.take_table_deltas(seq_id) == ()

    def perform_copies(self) -> None:
        """Make the copies that the manager asked for, in order."""
        for group_idx, src_id, dst_id, src_tier, dst_tier in self.pending:
            assert 0 not in (src_id, dst_id), "the null block is copied"
            size = self.manager.arena.layout.block_bytes[group_idx]
            for offset in range(size):
                self.stored[dst_tier][dst_id * size + offset] = self.stored[src_tier].get(src_id * size + offset)
        self.pending = []

    def refuses(self, error: type[Exception], command: Callable[[], object]) -> None:
        """Issue a command that must fail, and find nothing changed (M7)."""
        before = snapshot(self.manager)
        with pytest.raises(error):
            command()
        assert snapshot(self.manager) == before, "a failed command changed the manager"

    # ---- what must hold ----

    def verify(self) -> None:
        """Check the invariants, the twin, and what every sequence reads."""
        ops = self.manager.take_ops()
        self.pending += ops.copies if self.disk is None else self.disk.note(ops)
        check(self.manager)
        for seq_id, tokens in self.tokens.items():
            count = self.num_computed(seq_id)
            prefixes = self.prefixes(self.namespaces[seq_id], tokens, count)
            state = self.manager.sequences[seq_id]
            tier = Tier.HOST if state.is_swapped else Tier.DEVICE
            for group_idx, table in enumerate(state.tables_on(tier)):
                self._reads_back(group_idx, [(tier, block_id) for block_id in table], prefixes, count)
        verify_host_index(self, NAMESPACES)
        if self.has_twin:
            self._compare_with_twin()

    def _compare_with_twin(self) -> None:
        manager, twin = self.manager, self.twin
        usage = manager.usage()
        groups = range(len(self.size.kinds))
        num_idle = sum(len(group.idle) for group in twin.groups)
        num_used = sum(map(twin.num_used, groups))
        num_free = len(groups) * self.size.num_blocks - num_used - num_idle
        real = (usage.used, usage.idle, usage.free, usage.num_copies, usage.num_merges, usage.num_evictions)
        counts = (num_used, num_idle, num_free, twin.num_copies, twin.num_merges, twin.num_evictions)
        assert real == counts, "the twin counts otherwise"
        assert manager.sequences.keys() == twin.sequences.keys()
        block_of: dict[Page, int] = {}
        for seq_id, sequence in twin.sequences.items():
            state = manager.sequences[seq_id]
            assert (state.num_slots, state.num_computed) == (sequence.num_slots, sequence.num_computed)
            limit = 0 if state.is_swapped else manager.rollback_limit(seq_id)
            assert limit == 0 or not twin.can_truncate(seq_id, limit - 1), "it could be rolled back further"
            for group_idx, pages in enumerate(sequence.pages):
                table = manager.block_table(seq_id, group_idx)
                assert len(table) == len(pages)
                for page, block_id in zip(pages, table, strict=True):
                    assert (page is None) == (block_id == 0), "the twin thinks otherwise of what is dead"
                    if page is not None:
                        assert block_of.setdefault(page, block_id) == block_id, "shared otherwise than in the twin"
        for group, theirs in zip(manager.groups, twin.groups, strict=True):
            for page, block_id in zip(theirs.idle, group.pool.idle, strict=True):
                assert block_of.setdefault(page, block_id) == block_id, "evicted in another order than in the twin"
            published = {block_id for block_id, _ in group.pool.index.items()}
            assert published == {block_of[page] for page in theirs.published.values()}
            mine = [block_of[page] for page in block_of if page in theirs.idle or page in theirs.published.values()]
            assert len(set(mine)) == len(mine), "two pages of the twin are one block"
        if twin.host is not None:
            compare_hosts(self, twin.host, block_of)
        for page, block_id in block_of.items():
            assert self.block_of.get(page, block_id) == block_id, "a page of the twin moved"
        self.block_of = block_of

    # ---- the worker's side ----

    def _adopt(self, seq_id: int, chain: TokenChain, namespace: Namespace) -> None:
        self.tokens[seq_id] = chain.tokens
        self.chains[seq_id] = chain
        self.namespaces[seq_id] = namespace
        self.worker_tables[seq_id] = [[] for _ in self.size.kinds]

    def prefixes(self, namespace: Namespace, tokens: list[int], count: int) -> list[Content]:
        return [(namespace, tuple(tokens[: position + 1])) for position in range(count)]

    def bytes_of(self, group_idx: int, block_id: int, offset: int) -> range:
        """Return the bytes of a slot."""
        token_bytes = self.manager.groups[group_idx].spec.bytes_per_block // self.size.block_size
        start = (block_id * self.size.block_size + offset) * token_bytes
        return range(start, start + token_bytes)

    def _reads_back(self, group_idx: int, places: list[Place], prefixes: list[Content], query: int) -> None:
        """Assert that the query at a position reads what was stored (M5), as if all copies were made already."""
        kind = self.size.kinds[group_idx]
        positions = [position for position in range(query) if kind.reads(query, position)]
        self.positions_hold(group_idx, places, prefixes, positions)

    def positions_hold(
        self, group_idx: int, places: list[Place], prefixes: list[Content], positions: Iterable[int]
    ) -> None:
        sources: dict[Place, Place] = {}
        for idx, src_id, dst_id, src_tier, dst_tier in self.pending:
            if idx == group_idx:
                sources[dst_tier, dst_id] = sources.get((src_tier, src_id), (src_tier, src_id))
        for position in positions:
            block_idx, offset = divmod(position, self.size.block_size)
            tier, block_id = sources.get(places[block_idx], places[block_idx])
            for byte in self.bytes_of(group_idx, block_id, offset):
                content = self.stored[tier].get(byte)
                assert content == prefixes[position], f"M5: group {group_idx} reads other tokens at {position}"
