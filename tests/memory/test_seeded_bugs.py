"""Bugs put in on purpose, and the nets that must catch them: a net that catches nothing proves nothing.

Each net is a driver that other tests run on honest code, where it passes. Here every bug is met by every net that
claims it, and the net must tear: by a numbered invariant, by disagreement with the twin, or by reading other tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import InvariantViolation
from quire.memory import NO_OPS, FullAttention, KVCacheManager, Namespace, SlidingWindow, TokenChain, chain, invariants
from quire.memory.pool import NULL_BLOCK, BlockPool
from quire.memory.prefix_index import ChainView, PrefixIndex
from quire.memory.sequence_memory import SequenceMemory
from quire.scheduling import Scheduler, scheduler
from tests.memory.search import search
from tests.memory.twin import Kind
from tests.memory.world import World, WorldSize, random_walk
from tests.scheduling.rig import Setting, run
from tests.scheduling.test_random_runs import WINDOW, agrees, random_jobs, undisturbed

Patch = pytest.MonkeyPatch

# ---- the nets ----


FULL = Kind()
GROUPS = ((FULL,), (FULL, FULL), (FULL, Kind("window", 3)), (Kind("window", 4),), (Kind("chunk", 4), FULL))


def walk(*, has_twin: bool) -> None:
    """Random commands in small pools."""
    for seed in range(30):
        rng = random.Random(seed)
        size = WorldSize(rng.randrange(2, 9), rng.randrange(1, 4), kinds=rng.choice(GROUPS))
        random_walk(World(size, has_twin=has_twin), rng, 60)


def invariants_and_reading_back() -> None:
    """`check()` and reading through tables, after random commands."""
    walk(has_twin=False)


def slow_twin() -> None:
    """The same, compared with the twin."""
    walk(has_twin=True)


def small_world() -> None:
    """A complete search of the smallest world in which sharing, copying and eviction all happen."""
    search(WorldSize(2, 2), max_prompt=2, max_slots=2)


def window_world() -> None:
    """The same, of a window."""
    search(WorldSize(2, 1, kinds=(FULL, Kind("window", 1))), max_prompt=2, max_slots=2)
    search(WorldSize(2, 1, kinds=(Kind("window", 2),)), max_prompt=1, max_slots=3)


SETTINGS = (
    Setting(num_blocks=19, budget=16, max_num_seqs=8, watermark=1),
    Setting(num_blocks=19, budget=16, max_num_seqs=8, specs=(FullAttention(block_size=4), WINDOW)),
)


def long_run() -> None:
    """The real scheduler on simulated slots; without the audits, only what a worker or a client could notice."""
    jobs = random_jobs(random.Random(2), 30)
    for setting in SETTINGS:
        outcome = run(jobs, setting, is_audited=False)
        assert all(map(agrees, jobs, outcome.outputs, undisturbed(jobs)))


def audited_run() -> None:
    """The same, with the invariants of memory and scheduler checked after each step."""
    for setting in SETTINGS:
        run(random_jobs(random.Random(2), 30), setting)


NETS = (invariants_and_reading_back, slow_twin, small_world, long_run, audited_run)
HONEST_NETS = (*NETS, window_world)

# ---- the bugs ----


def skip_copy_on_write(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "_copy_on_write", lambda *_: None)


def lose_the_copies(patch: Patch) -> None:
    def take_ops(manager: KVCacheManager) -> Any:
        manager.pending_copies = []
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


def keep_the_digest_of_an_evicted_block(patch: Patch) -> None:
    def remove(index: PrefixIndex, block_id: int) -> None:
        del index._links[block_id]

    patch.setattr(PrefixIndex, "remove", remove)


def free_twice(patch: Patch) -> None:
    honest = KVCacheManager.free

    def free(manager: KVCacheManager, seq_id: int) -> None:
        table = manager.block_table(seq_id)
        honest(manager, seq_id)
        manager.groups[0].pool.release(table[-1:])

    patch.setattr(KVCacheManager, "free", free)


def publish_before_it_is_computed(patch: Patch) -> None:
    honest = KVCacheManager.append_slots

    def append_slots(manager: KVCacheManager, seq_id: int, num_tokens: int) -> bool:
        if not honest(manager, seq_id, num_tokens):
            return False
        state = manager.sequences[seq_id]
        num_full = min(state.num_slots, len(state.chain.tokens)) // manager.block_size
        if num_full > state.num_published:
            manager._publish_blocks(state, num_full)
        return True

    patch.setattr(KVCacheManager, "append_slots", append_slots)


def merge_without_releasing(patch: Patch) -> None:
    honest_publish, honest_release = KVCacheManager._publish_blocks, BlockPool.release

    def publish(manager: KVCacheManager, state: SequenceMemory, num_full: int) -> None:
        patch.setattr(BlockPool, "release", lambda *_: None)
        honest_publish(manager, state, num_full)
        patch.setattr(BlockPool, "release", honest_release)

    patch.setattr(KVCacheManager, "_publish_blocks", publish)


def merge_without_retaining(patch: Patch) -> None:
    honest_publish, honest_retain = KVCacheManager._publish_blocks, BlockPool.retain

    def publish(manager: KVCacheManager, state: SequenceMemory, num_full: int) -> None:
        patch.setattr(BlockPool, "retain", lambda *_: None)
        honest_publish(manager, state, num_full)
        patch.setattr(BlockPool, "retain", honest_retain)

    patch.setattr(KVCacheManager, "_publish_blocks", publish)


def forget_the_dirty_mark(patch: Patch) -> None:
    patch.setattr(SequenceMemory, "mark_dirty", lambda *_: None)


def leave_a_rewritten_block_published(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "_withdraw", lambda *_: None)


def ignore_the_namespace(patch: Patch) -> None:
    patch.setattr(Namespace, "serialise", lambda _: b"")


def keep_digests_when_truncated(patch: Patch) -> None:
    patch.setattr(TokenChain, "truncate", lambda *_: None)


def evict_the_head_first(patch: Patch) -> None:
    honest = BlockPool.release

    def release(pool: BlockPool, block_ids: Any) -> None:
        honest(pool, sorted(block_ids))

    patch.setattr(BlockPool, "release", release)


def bury_too_early(patch: Patch) -> None:
    """A window that forgets that the next token reads one token less of it."""
    patch.setattr(SlidingWindow, "first_live_token", lambda spec, num_tokens: max(0, num_tokens - spec.window + 2))


def bury_nothing(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "_bury", lambda *_: None)


def bury_without_releasing(patch: Patch) -> None:
    def bury(manager: KVCacheManager, state: SequenceMemory, group_idx: int) -> None:
        new = manager.groups[group_idx].num_dead(state.num_computed)
        state.tables[group_idx][:new] = [NULL_BLOCK] * new
        state.num_dead[group_idx] = new
        state.mark_dirty(group_idx, 0)

    patch.setattr(KVCacheManager, "_bury", bury)


def bury_what_is_only_looked_ahead(patch: Patch) -> None:
    honest = KVCacheManager.append_slots

    def append_slots(manager: KVCacheManager, seq_id: int, num_tokens: int) -> bool:
        if not honest(manager, seq_id, num_tokens):
            return False
        state = manager.sequences[seq_id]
        computed, state.num_computed = state.num_computed, state.num_slots
        for idx in manager._mortal:
            manager._bury(state, idx)
        state.num_computed = computed
        return True

    patch.setattr(KVCacheManager, "append_slots", append_slots)


def share_the_dead_with_a_child(patch: Patch) -> None:
    """A fork that forgets how much of the parent is dead."""
    honest = SequenceMemory.fork

    def fork(state: SequenceMemory, child_chain: TokenChain) -> SequenceMemory:
        child = honest(state, child_chain)
        child.num_dead = [0] * len(child.num_dead)
        return child

    patch.setattr(SequenceMemory, "fork", fork)


def hit_only_what_the_first_group_has(patch: Patch) -> None:
    patch.setattr(ChainView, "last_gap", lambda *_: -1)


def promise_without_the_step(patch: Patch) -> None:
    """Admission that counts a window as if tokens came one by one."""
    honest = SlidingWindow.peak_blocks
    patch.setattr(SlidingWindow, "peak_blocks", lambda spec, num_tokens, _: honest(spec, num_tokens, 1))


def half_refuse(patch: Patch) -> None:
    honest = KVCacheManager.append_slots

    def append_slots(manager: KVCacheManager, seq_id: int, num_tokens: int) -> bool:
        is_granted = honest(manager, seq_id, num_tokens)
        if not is_granted:
            manager.sequences[seq_id].dirty_from[0] = 0
        return is_granted

    patch.setattr(KVCacheManager, "append_slots", append_slots)


def promise_too_much(patch: Patch) -> None:
    patch.setattr(BlockPool, "num_available", property(lambda pool: len(pool.free_ids) + len(pool.idle) + 1))


def shrink_digests(patch: Patch) -> None:
    honest = chain.block_digest
    for module in (chain, invariants):
        patch.setattr(module, "block_digest", lambda parent, content: honest(parent, content)[:1] + b"?")


def trust_the_digest(patch: Patch) -> None:
    """A hit that compares no tokens; the digests are short enough to collide now and then."""
    shrink_digests(patch)

    patch.setattr(TokenChain, "recognises", lambda *_: True)


def keep_a_preempted_sequence_open(patch: Patch) -> None:
    def release(self: Scheduler, sequence: Any) -> None:
        self.memory.free(sequence.seq_id)
        sequence.is_open = False

    patch.setattr(Scheduler, "_release", release)


def give_no_seats_to_samples(patch: Patch) -> None:
    patch.setattr(scheduler, "_seats", lambda _: 1)


CAUGHT: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (skip_copy_on_write, NETS),
    (lose_the_copies, NETS),
    (leak_a_reference_on_fork, NETS),
    (keep_the_digest_of_an_evicted_block, NETS),
    (free_twice, NETS),
    (publish_before_it_is_computed, NETS),
    (merge_without_releasing, NETS),
    (merge_without_retaining, NETS),
    (forget_the_dirty_mark, NETS),
    (leave_a_rewritten_block_published, (invariants_and_reading_back, slow_twin, small_world)),
    (ignore_the_namespace, (invariants_and_reading_back, slow_twin)),
    (keep_digests_when_truncated, (invariants_and_reading_back, slow_twin, small_world)),
    (evict_the_head_first, (slow_twin,)),
    (bury_too_early, (invariants_and_reading_back, slow_twin, window_world)),
    (bury_nothing, (invariants_and_reading_back, slow_twin, window_world, audited_run)),
    (bury_without_releasing, (invariants_and_reading_back, slow_twin, window_world, audited_run)),
    (bury_what_is_only_looked_ahead, (invariants_and_reading_back, slow_twin, window_world, long_run)),
    (share_the_dead_with_a_child, (invariants_and_reading_back, slow_twin, window_world)),
    (hit_only_what_the_first_group_has, (invariants_and_reading_back, slow_twin)),
    (promise_without_the_step, (invariants_and_reading_back, slow_twin)),
    (half_refuse, (invariants_and_reading_back, slow_twin)),
    (promise_too_much, NETS),
    (trust_the_digest, (invariants_and_reading_back,)),
    (keep_a_preempted_sequence_open, (long_run, audited_run)),
    (give_no_seats_to_samples, (audited_run,)),
]


@pytest.mark.parametrize(
    ("seed_bug", "net"),
    [pytest.param(bug, net, id=f"{bug.__name__} - {net.__name__}") for bug, nets in CAUGHT for net in nets],
)
def test_the_net_catches_the_bug(
    monkeypatch: pytest.MonkeyPatch, seed_bug: Callable[[Patch], None], net: Callable[[], None]
) -> None:
    seed_bug(monkeypatch)
    # A broken table may also end in a look-up that finds nothing.
    with pytest.raises((AssertionError, InvariantViolation, LookupError)):
        net()


@pytest.mark.parametrize("net", HONEST_NETS, ids=lambda net: net.__name__)
def test_honest_code_passes_the_net(net: Callable[[], None]) -> None:
    net()


def test_honest_code_survives_short_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_digests(monkeypatch)
    invariants_and_reading_back()
