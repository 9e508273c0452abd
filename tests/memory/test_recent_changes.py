"""The record of copied, merged and evicted blocks: exact while it is read, and nothing while nobody reads it."""

from __future__ import annotations

from quire.memory import Namespace
from quire.memory.pool.recent_changes import MAX_RECENT, RecentChanges
from tests.memory.world import World
from tests.memory.world_size import WorldSize


def recording(num_blocks: int) -> tuple[World, RecentChanges]:
    world = World(WorldSize(num_blocks, 2), has_twin=False)
    recent = world.manager.groups[0].pool.recent = RecentChanges()
    return world, recent


def test_copies_merges_and_evictions_are_recorded() -> None:
    world, recent = recording(6)
    world.enter(0, [1, 1, 2])
    world.fork(0, 1, [3])
    world.grow(1, 1)
    usage = world.manager.usage()
    table = world.manager.sequences[1].tables[0]
    assert list(recent.copied) == [table[1]]
    assert (usage.num_copies, len(recent.copied)) == (1, 1)
    # Two sequences that compute the same block at once: the second one's is given back.
    for seq_id in (0, 1):
        world.free(seq_id)
    world.manager.reset_prefix_cache()
    chains = [world.manager.chain([4, 4, 5], Namespace()) for _ in range(2)]
    for seq_id, chain in enumerate(chains, 10):
        world.manager.allocate(seq_id, chain, world.manager.match_prefix(chain))
        world.manager.append_slots([seq_id], 3)
    world.manager.publish_each({10: 3})
    world.manager.publish_each({11: 3})
    assert list(recent.merged) == [world.manager.sequences[10].tables[0][0]]
    assert world.manager.usage().num_merges == 1


def test_evicted_blocks_are_recorded_up_to_a_bound() -> None:
    world, recent = recording(2)
    for token in range(4):
        world.enter(token, [token, token, token])
        world.free(token)
    assert world.manager.usage().num_evictions == len(recent.evicted) > 0
    assert recent.evicted.maxlen == MAX_RECENT
