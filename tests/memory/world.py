"""A small world: the manager, its slow twin, a worker's tables and what is stored, all moved by the same commands.

Every command is followed by `verify`: the numbered invariants, agreement with the twin, and reading every sequence back
through its table. What is stored at a slot is the whole prefix that its KV depends on, so that a block that was shared,
copied, merged, evicted or reused wrongly cannot read back right by luck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from quire.memory import AllocStatus, KVCacheManager, Namespace, Tier, TokenChain, Verdict, check
from quire.memory.invariants import snapshot
from quire.memory.pool.single_block_slabs import SingleBlockSlabs
from tests.memory.disk import Disk
from tests.memory.host_twin import HostTwin
from tests.memory.host_world import can_load, verify_host_index
from tests.memory.media import like, spans_of
from tests.memory.stored_slots import StoredSlots, prefixes_of
from tests.memory.twin import Twin
from tests.memory.twin_hits import diverged_at as parted_at_of
from tests.memory.twin_hits import match as match_prefix
from tests.memory.twin_pages import Page
from tests.memory.twin_world import compare_verdict, compare_with_twin, goes_first
from tests.memory.world_size import WorldSize, spec_of

NAMESPACES = (Namespace(), Namespace(cache_salt="tenant"))


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
        self.num_resets = 0
        self.manager = KVCacheManager(
            specs,
            None if size.num_bytes else size.num_blocks,
            num_bytes=size.num_bytes,
            watermark=size.watermark,
            enable_prefix_caching=size.caching,
            eviction=size.eviction,
            host_bytes=size.host_bytes or (size.host_blocks and (size.host_blocks + 1) * specs[0].bytes_per_block),
            pin_limit=size.pins,
            retention_limit=size.retention,
            snapshot_interval=size.interval,
            has_disk=size.has_disk,
        )
        self.disk = None if self.manager.archive is None else Disk(self, self.manager.archive)
        self.twin = Twin(
            size.num_blocks,
            size.block_size,
            size.kinds,
            watermark=size.watermark,
            caching=size.caching,
            pin_limit=size.pins,
            retention_limit=size.retention,
            interval=size.interval,
        )
        if size.host_blocks:
            self.twin.host = HostTwin(self.twin, size.host_blocks)
        self.has_twin = has_twin
        self.has_host = self.manager.host is not None
        self.tokens: dict[int, list[int]] = {}
        self.chains: dict[int, TokenChain] = {}
        self.namespaces: dict[int, Namespace] = {}
        self.worker_tables: dict[int, list[list[int]]] = {}
        self.slots = StoredSlots(self.manager, size)
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

    def is_lookahead(self, seq_id: int) -> bool:
        """Tell whether states are held to go back to: then all slots are stored, or none of them."""
        return self.manager.sequences[seq_id].checkpoint is not None

    def ways_back(self, seq_id: int) -> Sequence[int]:
        """Return the lengths below its own to which a sequence can be truncated."""
        limit, num_slots = self.manager.rollback.limit(seq_id), self.num_slots(seq_id)
        if any(kind.is_state for kind in self.size.kinds):
            return (limit,) if limit < num_slots else ()
        return range(limit, num_slots)

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
        chain = manager.chain(tokens, namespace, spans_of(tokens))
        hit = manager.match_prefix(chain, max_tokens)
        status = manager.capacity.can_allocate(len(tokens), hit, step, (reserved,) * len(self.size.kinds))
        assert snapshot(manager) == before, "a question changed the manager"
        assert hit.num_tokens < len(tokens), "a hit covers the whole prompt"
        assert max_tokens is None or hit.num_tokens <= max_tokens
        account = hit.account(len(tokens))
        assert sum(account.sources) == len(tokens), "not every token has a source"
        assert sum(account.reasons) == account.sources.computed, "not every computed token has a reason"
        assert account.sources.copied == hit.num_tokens % self.size.block_size
        prefixes = prefixes_of(namespace, tokens, hit.num_tokens)
        places = [[(Tier.DEVICE, block_id) for block_id in blocks] for blocks in hit.block_ids]
        for group_idx, block_idx, host_id in hit.loads:
            places[group_idx][block_idx] = (Tier.HOST, host_id)
        for group_idx, blocks in enumerate(places):
            self.slots.reads_back(group_idx, blocks, prefixes, hit.num_tokens)
        if self.has_twin:
            match = match_prefix(twin, namespace, tokens, max_tokens)
            found = [
                [(Tier(twin.is_on_host(idx, page)), self.block_of[page] if page else 0) for page in group]
                for idx, group in enumerate(match.pages)
            ]
            assert (found, match.num_tokens) == (places, hit.num_tokens), "the twin found another hit"
            assert hit.end in match.ends, "the twin gives another reason"
            diverged_at = parted_at_of(twin, namespace, tokens, max_tokens)
            assert hit.diverged_at in diverged_at, "the twin sees prompts part elsewhere"
            compare_verdict(self, status, len(tokens), match, step or len(tokens), reserved)
        if status.verdict is Verdict.LATER and not can_load(self, hit):
            self.refuses(ValueError, lambda: manager.allocate(seq_id, chain, hit))
        elif status.verdict is not Verdict.NEVER:
            manager.allocate(seq_id, chain, hit)
            self._adopt(seq_id, chain, namespace)
            if self.has_twin:
                twin.open(seq_id, namespace, tokens, match, hit.diverged_at)
            if self.disk is not None:
                # Before the copies of the hit are handed over.
                self.disk.verify_exports(chain, namespace)
        self.verify()
        return status

    def enter(self, seq_id: int, tokens: list[int], namespace: Namespace = NAMESPACES[0]) -> bool:
        """Open, get slots for and store a whole prompt; False, and nothing changed, when memory says no."""
        status = self.open(seq_id, tokens, namespace)
        if seq_id not in self.tokens:
            assert status.verdict is not Verdict.OK
            return False
        while missing := len(tokens) - self.num_computed(seq_id):
            # A step ends where a state is to be published.
            step = self.manager.step_limit(seq_id, missing)
            if not self.grow(seq_id, step):
                assert status.verdict is not Verdict.OK, "can_allocate promised what append_slots refuses"
                self.free(seq_id)
                return False
            self.store(seq_id, step)
        return True

    def grow(self, seq_id: int, num_tokens: int, *lookahead: int) -> bool:
        """Ask for slots, and perhaps for some to look ahead."""
        before = snapshot(self.manager)
        is_granted = self.manager.append_slots((seq_id,), num_tokens, *lookahead) > 0
        if not is_granted:
            assert snapshot(self.manager) == before, "a refused command changed the manager"
        if self.has_twin:
            assert is_granted == self.twin.append(seq_id, num_tokens, *lookahead), "the twin decides otherwise"
        self.verify()
        return is_granted

    def grow_together(self, seq_ids: list[int]) -> bool:
        """Ask for a slot more for each of some sequences."""
        before = snapshot(self.manager)
        is_granted = self.manager.append_slots(seq_ids, atomic=True) > 0
        if not is_granted:
            assert snapshot(self.manager) == before, "a refused command changed the manager"
        if self.has_twin:
            assert is_granted == self.twin.append_all(seq_ids), "the twin decides otherwise"
        self.verify()
        return is_granted

    def store(self, seq_id: int, num_tokens: int) -> None:
        """Run one step of a worker for one sequence: copies first, then the tokens' KV, then publish."""
        self.perform_copies()
        self.sync(seq_id)
        start = self.num_computed(seq_id)
        end = start + num_tokens
        prefixes = prefixes_of(self.namespaces[seq_id], self.tokens[seq_id], end)
        for group_idx, table in enumerate(self.worker_tables[seq_id]):
            if self.size.kinds[group_idx].is_state:
                self.slots.reads_back(group_idx, [(Tier.DEVICE, block_id) for block_id in table], prefixes, start)
                if start < end:
                    self.slots.write_state(group_idx, table[-1], prefixes[-1])
                continue
            for position in range(start, end):
                block_idx, offset = divmod(position, self.size.block_size)
                self.slots.write(group_idx, table[block_idx], offset, prefixes[position])
            for position in range(start, end):
                self.slots.reads_back(group_idx, [(Tier.DEVICE, block_id) for block_id in table], prefixes, position)
        self.manager.publish(seq_id, end)
        if self.has_twin:
            self.twin.store(seq_id, end, partial(goes_first, self, seq_id))
        self.verify()

    def fork(self, parent_id: int, child_id: int, new_tokens: list[int]) -> None:
        """Fork a sequence; the child goes on with other tokens."""
        parent = self.tokens[parent_id]
        tokens = like(parent, parent[: self.num_computed(parent_id)] + new_tokens)
        chain = self.manager.fork(parent_id, child_id, tokens)
        assert chain.tokens is tokens
        self._adopt(child_id, chain, self.namespaces[parent_id])
        if self.has_twin:
            self.twin.fork(parent_id, child_id, tokens)
        self.verify()

    def truncate(self, seq_id: int, num_tokens: int, *, keep_tokens: bool = False) -> None:
        """Roll a sequence back; its tokens stay known where they are only to be computed again.

        What was looked ahead was computed: the states that summed it up are of no use.
        """
        if self.is_lookahead(seq_id) and num_tokens < self.num_slots(seq_id):
            self.perform_copies()
            for group_idx, kind in enumerate(self.size.kinds):
                if kind.is_state:
                    self.slots.write_state(group_idx, self.manager.block_table(seq_id, group_idx)[-1], None)
        assert not self.has_twin or self.twin.can_truncate(seq_id, num_tokens)
        self.manager.truncate(seq_id, num_tokens)
        if not keep_tokens:
            del self.tokens[seq_id][num_tokens:]
        if self.has_twin:
            self.twin.truncate(seq_id, num_tokens)
        self.verify()

    def free(self, seq_id: int, *, retain: bool = False, is_sound: bool = True) -> None:
        """Release a sequence."""
        self.manager.free(seq_id, retain=retain, is_sound=is_sound)
        del self.tokens[seq_id], self.chains[seq_id], self.namespaces[seq_id], self.worker_tables[seq_id]
        if self.has_twin:
            self.twin.free(seq_id, retain=retain, is_sound=is_sound)
        self.verify()

    def pin(self, name: str, tokens: list[int], namespace: Namespace = NAMESPACES[0]) -> int:
        """Pin a prefix under a name that is not in use."""
        before = snapshot(self.manager)
        num_tokens = self.manager.pin(name, self.manager.chain(tokens, namespace, spans_of(tokens)))
        assert num_tokens or snapshot(self.manager) == before, "a refused pin changed the manager"
        if self.has_twin:
            assert num_tokens == self.twin.pin(name, namespace, tokens), "the twin pins otherwise"
        self.verify()
        return num_tokens

    def unpin(self, name: str) -> None:
        """Let go of a pin."""
        self.manager.unpin(name)
        if self.has_twin:
            self.twin.unpin(name)
        self.verify()

    def evict(self, group_idx: int, block_id: int) -> None:
        """Evict an idle block out of turn; the twin does not know."""
        slabs, pool = self.manager.arena.group_slabs[group_idx], self.manager.groups[group_idx].pool
        assert self.manager.arena.layout.blocks_per_slab[group_idx] == 1
        if pool.source is None:
            pool.evict((block_id,))
            pool.free.append(block_id)
        else:
            assert isinstance(slabs, SingleBlockSlabs)
            slabs.evict((block_id,))
            slabs.on_free((block_id,))

    def reset(self) -> None:
        """Forget all that is published."""
        self.manager.reset_prefix_cache()
        self.num_resets += 1
        if self.has_twin:
            self.twin.reset()
        self.verify()

    def sync(self, seq_id: int) -> None:
        """Replay table changes on the worker's side; afterwards both sides agree."""
        tables = self.worker_tables[seq_id]
        for delta in self.manager.take_table_deltas((seq_id,))[0]:
            tables[delta.group_idx][delta.start :] = delta.block_ids
        for group_idx, table in enumerate(tables):
            assert tuple(table) == self.manager.block_table(seq_id, group_idx), "the worker's table differs"
        assert self.manager.take_table_deltas((seq_id,))[0] == ()

    def perform_copies(self) -> None:
        """Make the copies that the manager asked for, in order."""
        self.slots.perform_copies()

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
        self.slots.pending += ops.copies if self.disk is None else self.disk.note(ops)
        check(self.manager)
        for seq_id, tokens in self.tokens.items():
            count = self.num_computed(seq_id)
            prefixes = prefixes_of(self.namespaces[seq_id], tokens, count)
            state = self.manager.sequences[seq_id]
            tier = Tier.HOST if state.is_swapped else Tier.DEVICE
            for group_idx, table in enumerate(state.tables_on(tier)):
                self.slots.reads_back(group_idx, [(tier, block_id) for block_id in table], prefixes, count)
            checkpoint = state.checkpoint
            if checkpoint is not None:
                for group_idx, block_id in checkpoint.block_ids.items():
                    self.slots.reads_back(group_idx, [(Tier.DEVICE, block_id)], prefixes, checkpoint.num_tokens)
        verify_host_index(self, NAMESPACES)
        if self.has_twin:
            compare_with_twin(self)

    # ---- the worker's side ----

    def _adopt(self, seq_id: int, chain: TokenChain, namespace: Namespace) -> None:
        self.tokens[seq_id] = chain.tokens
        self.chains[seq_id] = chain
        self.namespaces[seq_id] = namespace
        self.worker_tables[seq_id] = [[] for _ in self.size.kinds]
