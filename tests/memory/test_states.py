"""Groups of recurrent state: the block that a sequence carries along, its snapshots, and rollback."""

from __future__ import annotations

import pytest

from quire.memory import FullAttention, HitEnd, KVCacheManager, PrefixHit, RecurrentState, Verdict
from quire.memory.recording.settings import MemorySettings
from tests.memory.twin_pages import Kind
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize

FULL, STATE = Kind(), Kind("state")


def alone(num_blocks: int = 4, interval: int | None = None) -> World:
    return World(WorldSize(num_blocks, 2, kinds=(STATE,), interval=interval))


def hybrid(num_blocks: int = 8, interval: int | None = None) -> World:
    return World(WorldSize(num_blocks, 2, kinds=(FULL, STATE), interval=interval))


def ask(world: World, tokens: list[int]) -> PrefixHit:
    return world.manager.match_prefix(world.manager.chain(tokens, NAMESPACES[0]))


def decode(world: World, seq_id: int, tokens: list[int]) -> None:
    for token in tokens:
        assert world.grow(seq_id, 1)
        world.tokens[seq_id].append(token)
        world.store(seq_id, 1)


def published(world: World, group_idx: int) -> int:
    return len(world.manager.groups[group_idx].pool.index)


def test_prompts_without_snapshots_leave_the_prefix_tree_empty() -> None:
    """In a model of states alone a place without a snapshot would never be trimmed: no block of it can be evicted."""
    manager = KVCacheManager([RecurrentState(block_size=2)], 4)
    for seq_id in range(300):
        chain = manager.chain([seq_id, 0, 0, 0, 0], NAMESPACES[0])
        manager.allocate(seq_id, chain, manager.match_prefix(chain))
        assert manager.append_slots((seq_id,), 5), "one step, which passes the place of the snapshot"
        manager.publish(seq_id, 5)
        manager.free(seq_id)
        manager.take_ops()
    assert len(manager.tree.nodes()) == 0
    world = alone()
    for seq_id in range(300):
        world.enter(seq_id, [seq_id, 0, 0, 0, 0])
        world.free(seq_id)
    nodes = world.manager.tree.nodes()
    assert len(nodes) <= 2 * 4 + 1, "no more than the snapshots that are there, those gone last, and the root"


# ---- growth ----


def test_a_state_is_one_block_however_long_its_sequence_is() -> None:
    world = World(WorldSize(4, 2, kinds=(STATE,), caching=False))
    world.enter(1, [0])
    decode(world, 1, [1, 0, 1, 0])
    assert world.manager.block_table(1) == (0, 0, 1)
    usage = world.manager.usage()
    assert (usage.used, usage.idle, usage.num_copies) == (1, 0, 0)


def test_what_stays_is_copied_before_the_next_step_writes() -> None:
    world = alone(interval=2)
    world.enter(1, [0, 1])
    assert (world.manager.block_table(1), published(world, 0)) == ((1,), 1)
    assert world.grow(1, 1)
    assert world.manager.block_table(1) == (0, 2)
    assert (world.manager.usage().used, world.manager.usage().idle) == (1, 1)
    assert world.slots.pending[0][:3] == (0, 1, 2)


def test_without_room_for_a_copy_the_snapshot_is_written_over() -> None:
    world = alone(num_blocks=1, interval=2)
    world.enter(1, [0, 1])
    assert published(world, 0) == 1
    decode(world, 1, [0])
    assert (world.manager.block_table(1), published(world, 0)) == ((0, 1), 0)
    assert world.manager.usage().num_copies == 0


def test_the_first_writer_of_a_fork_copies_or_is_refused() -> None:
    world = alone(num_blocks=2)
    world.enter(1, [0])
    world.fork(1, 2, [])
    assert world.manager.capacity.blocks_missing(1, 2) == (1,)
    assert world.grow(1, 1)
    assert world.grow(2, 1)
    assert world.manager.usage().num_copies == 1
    full = alone(num_blocks=1)
    full.enter(1, [0])
    full.fork(1, 2, [])
    assert not full.grow(1, 1)


def test_admission_counts_one_block_and_no_snapshot_in_use() -> None:
    world = alone(num_blocks=2, interval=2)
    status = world.open(1, [0, 1, 0, 1, 0])
    assert (status.verdict, status.needed, status.available) == (Verdict.OK, 1, 2)
    assert world.grow(1, 2)
    world.store(1, 2)
    world.enter(2, [1, 1])
    hit = ask(world, [0, 1, 0])
    assert hit.block_ids == ((1,),)
    assert world.manager.capacity.can_allocate(3, hit) == (Verdict.LATER, 0, 1, 0)
    world.free(1)
    assert world.manager.capacity.can_allocate(3, ask(world, [0, 1, 0])) == (Verdict.OK, 0, 0, 0)
    assert world.manager.capacity.can_ever_hold(10**9)


# ---- snapshots ----


def test_steps_end_where_snapshots_are_due() -> None:
    world = hybrid(num_blocks=20, interval=6)
    world.open(1, list(range(17)))
    steps = []
    while world.num_computed(1) < 17:
        steps.append(world.manager.step_limit(1, 17 - world.num_computed(1)))
        assert world.grow(1, steps[-1])
        world.store(1, steps[-1])
    # Every six tokens, and the last block that leaves a token of the prompt to compute.
    assert steps == [6, 6, 4, 1]
    assert (published(world, 0), published(world, 1)) == (8, 3)
    assert world.manager.step_limit(1, 100) == 1


def test_no_snapshot_is_taken_in_passing_and_none_without_a_prefix_cache() -> None:
    world = hybrid(num_blocks=20, interval=2)
    world.open(1, list(range(9)))
    assert world.grow(1, 9)
    world.store(1, 9)
    assert (published(world, 0), published(world, 1)) == (4, 0)
    off = World(WorldSize(4, 2, kinds=(STATE,), caching=False, interval=2))
    off.open(1, [0] * 5)
    assert off.manager.step_limit(1, 5) == 5
    world.reset()
    assert world.manager.step_limit(1, 5) == 5


def test_a_hit_ends_at_the_last_snapshot_and_says_so() -> None:
    world = hybrid(num_blocks=20, interval=6)
    world.enter(1, list(range(17)))
    hit = ask(world, [*range(15), 99, 99])
    assert (hit.num_tokens, hit.end, hit.group_idx, hit.diverged_at) == (12, HitEnd.GROUP, 1, 14)
    assert [block_id == 0 for block_id in hit.block_ids[1]] == [True] * 5 + [False]
    hit = ask(world, list(range(17)))
    assert (hit.num_tokens, hit.end, hit.diverged_at) == (16, HitEnd.LAST_TOKEN, 0)
    hit = ask(world, [99] * 9)
    assert (hit.num_tokens, hit.end, hit.group_idx, hit.diverged_at) == (0, HitEnd.NOT_CACHED, None, 0)


def test_a_diverging_prompt_takes_the_snapshot_that_the_next_one_hits() -> None:
    world = hybrid(num_blocks=40)
    shared = list(range(8))
    world.enter(1, [*shared, 90, 91, 92])
    world.enter(2, [*shared, 80, 81, 82])
    assert ask(world, [*shared, 70, 71, 72]).num_tokens == 8
    assert world.manager.sequences[2].snapshot_points == (8, 10)


def test_equal_states_are_merged() -> None:
    world = alone(num_blocks=6, interval=2)
    for seq_id in (1, 2):
        world.open(seq_id, [0, 1, 0])
        assert world.grow(seq_id, 2)
    for seq_id in (1, 2):
        world.store(seq_id, 2)
    assert world.manager.block_table(1) == world.manager.block_table(2) == (1,)
    assert world.manager.usage().num_merges == 1


def test_a_pinned_snapshot_stays_and_is_copied() -> None:
    manager = KVCacheManager([RecurrentState(block_size=2)], 3, pin_limit=1, snapshot_interval=2)
    chain = manager.chain([0, 1], NAMESPACES[0])
    manager.allocate(1, chain, manager.match_prefix(chain))
    manager.append_slots((1,), 2)
    manager.publish(1, 2)
    assert manager.pin("system", chain) == 2
    manager.append_slots((1,), 1)
    assert manager.block_table(1) == (0, 2)
    manager.free(1)
    assert manager.usage().used == 1


# ---- looking ahead ----


def test_a_rejected_draft_goes_back_to_the_state_before_it() -> None:
    world = hybrid()
    world.enter(1, [0, 1, 0])
    before = world.manager.block_table(1, 1)
    assert world.grow(1, 1, 2)
    assert world.manager.rollback.limit(1) == 3
    assert world.manager.usage().groups[1].used == 2
    world.tokens[1] += [1, 0, 0]
    world.refuses(ValueError, lambda: world.manager.publish(1, 4))
    world.refuses(ValueError, lambda: world.manager.truncate(1, 4))
    world.truncate(1, 3)
    assert world.manager.block_table(1, 1) == before
    assert world.manager.rollback.limit(1) == 3
    decode(world, 1, [1, 1])


def test_an_accepted_draft_lets_go_of_the_state_before_it() -> None:
    world = hybrid()
    world.enter(1, [0, 1, 0])
    assert world.grow(1, 1, 2)
    assert world.grow(1, 1, 1), "what is held already stays held"
    world.tokens[1] += [1, 0, 0, 1, 1]
    world.store(1, 5)
    assert (world.manager.rollback.limit(1), world.manager.usage().groups[1].used) == (8, 1)


def test_a_first_draft_goes_back_to_nothing() -> None:
    world = alone(num_blocks=1)
    world.open(1, [0, 1, 0])
    assert world.grow(1, 1, 2)
    world.truncate(1, 0)
    assert world.manager.block_table(1) == ()
    assert world.grow(1, 3)


def test_lookahead_is_refused_without_a_block_for_the_state() -> None:
    world = alone(num_blocks=1)
    world.enter(1, [0])
    assert not world.grow(1, 1, 1)
    assert world.grow(1, 1)


def test_a_held_state_is_freed_with_its_sequence() -> None:
    world = alone(interval=2)
    world.enter(1, [0, 1])
    assert world.grow(1, 1, 1)
    world.free(1)
    assert (world.manager.usage().used, world.manager.usage().idle) == (0, 1)


def test_a_held_state_may_move() -> None:
    """Four states to a slab: the one that is alone in its slab moves when another group needs the slab."""
    world = World(WorldSize(0, 1, kinds=(FULL, STATE), layers=(4, 1), caching=False, num_bytes=8 * 11), has_twin=False)
    for seq_id in range(1, 9):
        assert world.enter(seq_id, [seq_id])
    for seq_id in (5, 6, 7, 3, 4):
        world.free(seq_id)
    assert world.grow(8, 1, 1)
    checkpoint = world.manager.sequences[8].checkpoint
    assert checkpoint is not None
    before = dict(checkpoint.block_ids)
    while world.grow(8, 1):
        pass
    assert checkpoint.block_ids != before
    world.truncate(8, 1)
    assert world.manager.block_table(8, 1) == tuple(checkpoint.block_ids.values())


# ---- settings ----


def test_the_interval_is_a_multiple_of_the_block_size() -> None:
    specs = [RecurrentState(block_size=3)]
    for interval in (0, -3, 4):
        with pytest.raises(ValueError, match="positive multiple of the block size 3"):
            KVCacheManager(specs, 4, snapshot_interval=interval)
    manager = KVCacheManager(specs, 4)
    chain = manager.chain([0] * 2000, NAMESPACES[0])
    manager.allocate(1, chain, manager.match_prefix(chain))
    assert manager.step_limit(1, 2000) == 513


def test_settings_go_round() -> None:
    specs = (FullAttention(block_size=4), RecurrentState(block_size=4, num_layers=3, layer_bytes=100))
    settings = MemorySettings(specs=specs, num_bytes=10_000, snapshot_interval=8)
    assert MemorySettings.from_json(settings.to_json()) == settings
    assert settings.build().groups[1].spec.bytes_per_block == 300
