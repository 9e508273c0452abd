"""Bugs put in on purpose, and the nets that must catch them: a net that catches nothing proves nothing.

Each net is a driver that other tests run on honest code, where it passes. Here every bug is met by every net that
claims it, and the net must tear: by a numbered invariant, by disagreement with the twin, or by reading other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from quire.memory import NO_OPS, KVCacheManager, Namespace, SlidingWindow, TokenChain, manager
from quire.memory.groups.cache_group import CacheGroup
from quire.memory.pool.arena import Arena
from quire.memory.pool.multi_block_slabs import MultiBlockSlabs
from quire.memory.pool.pool import NULL_BLOCK, BlockPool
from quire.memory.pool.single_block_slabs import SingleBlockSlabs
from quire.memory.pool.slab_layout import SlabLayout
from quire.memory.prefix import token_chain
from quire.memory.prefix.published import ChainView, PublishedBlocks
from quire.memory.prefix.radix_node import RadixNode
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables import publish as publishing
from quire.memory.tables.tables import BlockTables
from quire.scheduling import admission
from quire.scheduling.queues import Queues
from tests.memory.nets import (
    HONEST_NETS,
    NETS,
    TEARS,
    audited_run,
    each_net,
    invariants_and_reading_back,
    long_run,
    slow_twin,
    small_world,
    window_world,
)

Patch = pytest.MonkeyPatch


def skip_copy_on_write(patch: Patch) -> None:
    patch.setattr(BlockTables, "_copy_on_write", lambda *_: None)


def lose_the_copies(patch: Patch) -> None:
    def take_ops(manager: KVCacheManager) -> Any:
        manager.tables.pending_copies = []
        return NO_OPS

    patch.setattr(KVCacheManager, "take_ops", take_ops)


def leak_a_reference_on_fork(patch: Patch) -> None:
    honest = KVCacheManager.fork

    def fork(manager: KVCacheManager, parent_id: int, child_id: int, tokens: list[int]) -> TokenChain:
        child = honest(manager, parent_id, child_id, tokens)
        for group in manager.groups:
            group.pool.retain(manager.block_table(child_id)[:1])
        return child

    patch.setattr(KVCacheManager, "fork", fork)


def keep_the_place_of_an_evicted_block(patch: Patch) -> None:
    def remove(index: PublishedBlocks, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            index._nodes[block_id] = None

    patch.setattr(PublishedBlocks, "remove", remove)


def free_twice(patch: Patch) -> None:
    honest = KVCacheManager.free

    def free(manager: KVCacheManager, seq_id: int, *, retain: bool = False, is_sound: bool = True) -> None:
        table = manager.block_table(seq_id)
        honest(manager, seq_id, retain=retain, is_sound=is_sound)
        manager.groups[0].pool.release(table[-1:])

    patch.setattr(KVCacheManager, "free", free)


def publish_before_it_is_computed(patch: Patch) -> None:
    honest = KVCacheManager.append_slots

    def append_slots(manager: KVCacheManager, seq_ids: Sequence[int], *args: Any, **options: Any) -> int:
        num_granted = honest(manager, seq_ids, *args, **options)
        for state in map(manager.sequences.__getitem__, seq_ids[:num_granted]):
            num_full = min(state.num_slots, len(state.chain.tokens)) // manager.block_size
            if num_full > state.num_published:
                publishing.publish_blocks(manager.groups, state, num_full)
        return num_granted

    patch.setattr(KVCacheManager, "append_slots", append_slots)


def merge_without_releasing(patch: Patch) -> None:
    honest_publish, honest_release = publishing.publish_blocks, BlockPool.release

    def publish(groups: Any, state: SequenceBlocks, num_full: int) -> int:
        patch.setattr(BlockPool, "release", lambda *_: None)
        num_merges = honest_publish(groups, state, num_full)
        patch.setattr(BlockPool, "release", honest_release)
        return num_merges

    patch.setattr(manager, "publish_blocks", publish)


def merge_without_retaining(patch: Patch) -> None:
    honest_publish, honest_retain = publishing.publish_blocks, BlockPool.retain

    def publish(groups: Any, state: SequenceBlocks, num_full: int) -> int:
        patch.setattr(BlockPool, "retain", lambda *_: None)
        num_merges = honest_publish(groups, state, num_full)
        patch.setattr(BlockPool, "retain", honest_retain)
        return num_merges

    patch.setattr(manager, "publish_blocks", publish)


def forget_the_dirty_mark(patch: Patch) -> None:
    patch.setattr(SequenceBlocks, "mark_dirty", lambda *_: None)


def leave_a_rewritten_block_published(patch: Patch) -> None:
    patch.setattr(BlockTables, "_unpublish", lambda *_: None)


def ignore_the_namespace(patch: Patch) -> None:
    honest = token_chain.root_of
    patch.setattr(manager, "root_of", lambda _, key: honest(Namespace(), key))


def keep_contents_when_truncated(patch: Patch) -> None:
    patch.setattr(TokenChain, "truncate", lambda *_: None)


def evict_the_head_first(patch: Patch) -> None:
    honest = BlockPool.release

    def release(pool: BlockPool, block_ids: Any, *args: Any) -> None:
        honest(pool, sorted(block_ids), *args)

    patch.setattr(BlockPool, "release", release)


def bury_too_early(patch: Patch) -> None:
    """A window that forgets that the next token reads one token less of it."""
    patch.setattr(SlidingWindow, "first_live_token", lambda spec, num_tokens: max(0, num_tokens - spec.window + 2))


def bury_nothing(patch: Patch) -> None:
    patch.setattr(manager, "free_out_of_window", lambda *_: None)


def bury_without_releasing(patch: Patch) -> None:
    def free_out_of_window(group: CacheGroup, state: SequenceBlocks, group_idx: int) -> None:
        new = group.num_skipped(state.num_computed)
        state.tables[group_idx][:new] = [NULL_BLOCK] * new
        state.num_skipped[group_idx] = new
        state.mark_dirty(group_idx, 0)

    patch.setattr(manager, "free_out_of_window", free_out_of_window)


def bury_what_is_only_looked_ahead(patch: Patch) -> None:
    honest = KVCacheManager.append_slots

    def append_slots(memory: KVCacheManager, seq_ids: Sequence[int], *args: Any, **options: Any) -> int:
        num_granted = honest(memory, seq_ids, *args, **options)
        for state in map(memory.sequences.__getitem__, seq_ids[:num_granted]):
            computed, state.num_computed = state.num_computed, state.num_slots
            for idx in memory.windowed_groups:
                publishing.free_out_of_window(memory.groups[idx], state, idx)
            state.num_computed = computed
        return num_granted

    patch.setattr(KVCacheManager, "append_slots", append_slots)


def share_the_dead_with_a_child(patch: Patch) -> None:
    """A fork that forgets how much of the parent is dead."""
    honest = SequenceBlocks.fork

    def fork(state: SequenceBlocks, child_chain: TokenChain) -> SequenceBlocks:
        child = honest(state, child_chain)
        child.num_skipped = [0] * len(child.num_skipped)
        return child

    patch.setattr(SequenceBlocks, "fork", fork)


def hit_only_what_the_first_group_has(patch: Patch) -> None:
    patch.setattr(ChainView, "last_gap", lambda *_: -1)


def promise_without_the_step(patch: Patch) -> None:
    """Admission that counts a window as if tokens came one by one."""
    honest = SlidingWindow.peak_blocks
    patch.setattr(SlidingWindow, "peak_blocks", lambda spec, num_tokens, _: honest(spec, num_tokens, 1))


def lend_a_slab_twice(patch: Patch) -> None:
    for kind in (SingleBlockSlabs, MultiBlockSlabs):

        def return_slabs(group: Any, slabs: list[int], honest: Any = kind.return_slabs) -> None:
            honest(group, slabs)
            group._supply.free.append(slabs[0])

        patch.setattr(kind, "return_slabs", return_slabs)


def keep_empty_slabs(patch: Patch) -> None:
    for kind in (SingleBlockSlabs, MultiBlockSlabs):

        def return_slabs(group: Any, slabs: list[int], honest: Any = kind.return_slabs) -> None:
            if len(slabs) > 1:
                honest(group, slabs[1:])

        patch.setattr(kind, "return_slabs", return_slabs)


def move_blocks_without_copying(patch: Patch) -> None:
    honest = BlockTables.take

    def take(tables: BlockTables, group_idx: int, count: int) -> list[int]:
        before = list(tables.pending_copies)
        block_ids = honest(tables, group_idx, count)
        tables.pending_copies = before
        return block_ids

    patch.setattr(BlockTables, "take", take)


def move_blocks_without_telling_the_tables(patch: Patch) -> None:
    def take(tables: BlockTables, group_idx: int, count: int) -> list[int]:
        block_ids = tables.groups[group_idx].pool.take(count)
        tables.pending_copies += tables.arena.moves
        tables.arena.moves = []
        return block_ids

    patch.setattr(BlockTables, "take", take)


def overlap_the_views(patch: Patch) -> None:
    """Slabs whose blocks start a block too early."""
    honest = SlabLayout.first_blocks

    def first_blocks(layout: SlabLayout, idx: int, slabs: Iterable[int]) -> list[int]:
        return [block_id - idx for block_id in honest(layout, idx, slabs)]

    patch.setattr(SlabLayout, "first_blocks", first_blocks)


def let_the_living_publish_after_a_reset(patch: Patch) -> None:
    honest = KVCacheManager.reset_prefix_cache

    def reset(memory: KVCacheManager) -> None:
        honest(memory)
        for state in memory.sequences.values():
            state.is_publishing = True

    patch.setattr(KVCacheManager, "reset_prefix_cache", reset)


def find_what_a_reset_forgot(patch: Patch) -> None:
    patch.setattr(BlockPool, "reset", lambda *_: None)


def lose_what_was_idle_at_a_reset(patch: Patch) -> None:
    def reset(pool: BlockPool) -> None:
        pool.idle.remove(list(pool.idle))
        pool.index.clear()

    patch.setattr(BlockPool, "reset", reset)


def half_refuse(patch: Patch) -> None:
    honest = KVCacheManager.append_slots

    def append_slots(manager: KVCacheManager, seq_ids: Sequence[int], *args: Any, **options: Any) -> int:
        num_granted = honest(manager, seq_ids, *args, **options)
        for seq_id in seq_ids[num_granted:]:
            manager.sequences[seq_id].dirty_from[0] = 0
        return num_granted

    patch.setattr(KVCacheManager, "append_slots", append_slots)


def promise_too_much(patch: Patch) -> None:
    fits, available_blocks = Arena.fits, Arena.available_blocks
    patch.setattr(Arena, "fits", lambda arena, needs: fits(arena, [max(0, need - 1) for need in needs]))
    patch.setattr(Arena, "available_blocks", lambda arena, *args: [room + 1 for room in available_blocks(arena, *args)])


def shrink_digests(patch: Patch) -> None:
    honest = token_chain.block_digests

    def block_digests(parent: bytes, contents: Iterable[bytes]) -> list[bytes]:
        digests = []
        for content in contents:
            parent = honest(parent, (content,))[0][:1] + b"?"
            digests.append(parent)
        return digests

    patch.setattr(token_chain, "block_digests", block_digests)


def trust_the_digest(patch: Patch) -> None:
    """A hit that compares no tokens; the digests are short enough to collide now and then."""
    shrink_digests(patch)

    def branch(node: RadixNode, position: int, content: bytes) -> RadixNode | None:
        return node.branches.get(position, {}).get(token_chain.block_digest(node.digest_before(position), content))

    patch.setattr(RadixNode, "branch", branch)
    patch.setattr(
        RadixNode, "num_equal", lambda node, _, start, end: min(end - start, node.first + node.length - start)
    )


def keep_a_preempted_sequence_open(patch: Patch) -> None:
    def close(_: Queues, sequence: Any) -> None:
        sequence.is_open = False

    patch.setattr(Queues, "close", close)


def give_no_slots_to_samples(patch: Patch) -> None:
    patch.setattr(admission, "slots_needed", lambda _: 1)


CAUGHT: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (skip_copy_on_write, NETS),
    (lose_the_copies, NETS),
    (leak_a_reference_on_fork, NETS),
    (keep_the_place_of_an_evicted_block, NETS),
    (free_twice, NETS),
    (publish_before_it_is_computed, NETS),
    (merge_without_releasing, NETS),
    (merge_without_retaining, NETS),
    (forget_the_dirty_mark, NETS),
    (leave_a_rewritten_block_published, (invariants_and_reading_back, slow_twin, small_world)),
    (ignore_the_namespace, (invariants_and_reading_back, slow_twin)),
    (keep_contents_when_truncated, (invariants_and_reading_back, slow_twin, small_world)),
    (evict_the_head_first, (slow_twin,)),
    (bury_too_early, (invariants_and_reading_back, slow_twin, window_world)),
    (bury_nothing, (invariants_and_reading_back, slow_twin, window_world, audited_run)),
    (bury_without_releasing, (invariants_and_reading_back, slow_twin, window_world, audited_run)),
    (bury_what_is_only_looked_ahead, (invariants_and_reading_back, slow_twin, window_world, long_run)),
    (share_the_dead_with_a_child, (invariants_and_reading_back, slow_twin, window_world)),
    (hit_only_what_the_first_group_has, (invariants_and_reading_back, slow_twin)),
    (promise_without_the_step, (invariants_and_reading_back, slow_twin)),
    (lend_a_slab_twice, (invariants_and_reading_back, slow_twin, audited_run)),
    (keep_empty_slabs, (invariants_and_reading_back, slow_twin, audited_run)),
    (move_blocks_without_copying, (invariants_and_reading_back,)),
    (move_blocks_without_telling_the_tables, (invariants_and_reading_back,)),
    (overlap_the_views, (invariants_and_reading_back,)),
    (let_the_living_publish_after_a_reset, (invariants_and_reading_back, slow_twin)),
    (find_what_a_reset_forgot, (slow_twin,)),
    (lose_what_was_idle_at_a_reset, (invariants_and_reading_back, slow_twin)),
    (half_refuse, (invariants_and_reading_back, slow_twin)),
    (promise_too_much, (invariants_and_reading_back, slow_twin, long_run, audited_run)),
    (trust_the_digest, (invariants_and_reading_back,)),
    (keep_a_preempted_sequence_open, (long_run, audited_run)),
    (give_no_slots_to_samples, (audited_run,)),
]


@pytest.mark.parametrize(("seed_bug", "net"), each_net(CAUGHT))
def test_the_net_catches_the_bug(
    monkeypatch: pytest.MonkeyPatch, seed_bug: Callable[[Patch], None], net: Callable[[], None]
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises(TEARS):
        net()


# Complete searches and twins are slow: test_small_worlds.py and test_state_machine.py have others in the default run.
@pytest.mark.parametrize(
    "net",
    [
        pytest.param(net, marks=pytest.mark.slow if net.__name__.endswith(("_world", "_twin")) else [])
        for net in HONEST_NETS
    ],
    ids=lambda net: net.__name__,
)
def test_honest_code_passes_the_net(net: Callable[[], None]) -> None:
    net()


def test_honest_code_survives_short_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_digests(monkeypatch)
    invariants_and_reading_back()
