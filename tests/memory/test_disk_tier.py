"""The disk tier: saves, loads, and the blocks that are published after a load."""

from __future__ import annotations

import random

import pytest

from quire.memory import FullAttention, KVCacheManager, Namespace, SlidingWindow, Tier, TokenChain, check
from quire.memory.results import BlockCopy, FetchedBlock, StoredBlock
from quire.memory.specs import KVCacheSpec
from quire.memory.tiers.disk_tier import DiskTier
from tests.memory.checkers import disk_read_back, disk_reference
from tests.memory.search import Searched, search
from tests.memory.twin_pages import Kind
from tests.memory.world import World
from tests.memory.world_size import WorldSize


def make(num_blocks: int = 4, host_blocks: int = 2, num_groups: int = 1) -> tuple[KVCacheManager, DiskTier]:
    """Return a manager of blocks of 2 tokens, with its disk tier."""
    both: list[KVCacheSpec] = [FullAttention(block_size=2), SlidingWindow(block_size=2, window=3)]
    specs = both[:num_groups]
    host_bytes = (host_blocks + 1) * specs[0].bytes_per_block
    memory = KVCacheManager(specs, num_blocks, host_bytes=host_bytes, has_disk=True)
    assert memory.archive is not None
    return memory, memory.archive


def enter(memory: KVCacheManager, seq_id: int, tokens: list[int]) -> TokenChain:
    """Open a sequence, store all its tokens and free it."""
    chain = memory.chain(tokens, Namespace())
    hit = memory.match_prefix(chain)
    memory.allocate(seq_id, chain, hit)
    assert memory.append_slots((seq_id,), len(tokens) - hit.num_tokens)
    memory.publish(seq_id, len(tokens))
    memory.free(seq_id)
    check(memory)
    return chain


def saved(memory: KVCacheManager) -> list[StoredBlock]:
    """Take the movements, and return what goes to disk."""
    ops = memory.take_ops()
    places = [copy.dst_id for copy in ops.copies if copy.dst_tier is Tier.DISK]
    assert places == list(range(len(ops.saves)))
    return list(ops.saves)


def test_random_commands_with_a_disk() -> None:
    disk_read_back()


def test_random_commands_with_a_disk_and_the_twin() -> None:
    disk_reference()


@pytest.mark.slow
def test_every_command_in_every_state_of_a_small_world() -> None:
    """Loads among them; with what is on disk, states are many more than the manager's own."""
    assert search(WorldSize(1, 1, host_blocks=1, has_disk=True), max_prompt=1, max_slots=1) == Searched(618, 4824)
    window = WorldSize(1, 1, kinds=(Kind(), Kind("window", 1)), host_blocks=2, has_disk=True)
    assert search(window, max_prompt=1, max_slots=1, num_sequences=1) == Searched(71, 317)


def test_a_disk_needs_a_host_tier() -> None:
    with pytest.raises(ValueError, match="set host_bytes"):
        KVCacheManager([FullAttention(block_size=2)], 4, has_disk=True)


def test_what_the_host_evicts_is_saved_before_its_block_is_taken() -> None:
    memory, archive = make(num_blocks=2, host_blocks=1)
    first = enter(memory, 1, [1, 1, 2, 2])
    enter(memory, 2, [3, 3, 4, 4])
    ops = memory.take_ops()
    # The tail goes to the host, makes room for the head there, and is saved before that.
    assert ops.copies == (
        BlockCopy(0, ops.copies[0].src_id, 1, Tier.DEVICE, Tier.HOST),
        BlockCopy(0, 1, 0, Tier.HOST, Tier.DISK),
        BlockCopy(0, ops.copies[2].src_id, 1, Tier.DEVICE, Tier.HOST),
    )
    assert ops.saves == (StoredBlock(0, first.digests(2)[1], first.content(1), first.digests(2)[0]),)
    assert archive.num_saves == 1
    assert memory.take_ops().saves == ()


def test_a_reset_saves_nothing_of_before() -> None:
    memory, archive = make(num_blocks=2, host_blocks=1)
    enter(memory, 1, [1, 1, 2, 2])
    enter(memory, 2, [3, 3, 4, 4])
    memory.reset_prefix_cache()
    assert saved(memory) == []
    assert archive.saving_ops().copies == ()
    enter(memory, 3, [5, 5, 6, 6])
    assert saved(memory) == []


def test_a_load_is_found_as_a_hit() -> None:
    memory, archive = make(num_blocks=4, host_blocks=3)
    chain = memory.chain([1, 1, 2, 2, 3, 3, 4], Namespace())
    plan = archive.find_loads(chain, lambda _: True)
    assert plan.num_blocks == 3
    assert [load.block_idx for load in plan.loads] == [0, 1, 2]
    assert archive.find_loads(chain, lambda _: True, max_tokens=5).num_blocks == 2
    assert archive.find_loads(chain, lambda block: block != plan.loads[1].block).num_blocks == 1
    assert archive.find_loads(chain, lambda _: False).loads == []
    fetched = [FetchedBlock(0, load.block_idx, 10 + load.block_idx) for load in plan.loads]
    assert archive.publish_loaded(chain, 3, fetched) == [10, 11, 12]
    check(memory)
    hit = memory.match_prefix(chain)
    assert (hit.num_tokens, hit.num_host_tokens) == (6, 6)
    memory.allocate(1, chain, hit)
    copies = memory.take_ops().copies
    assert [(copy.src_tier, copy.dst_tier) for copy in copies] == [
        *[(Tier.DISK, Tier.HOST)] * 3,
        *[(Tier.HOST, Tier.DEVICE)] * 3,
    ]
    # A second time there is nothing to load, and what is given all the same is not needed.
    assert archive.find_loads(chain, lambda _: True).loads == []
    assert archive.publish_loaded(chain, 3, fetched) == []
    check(memory)


def test_a_window_loads_its_last_blocks_only() -> None:
    memory, archive = make(num_blocks=8, host_blocks=9, num_groups=2)
    chain = memory.chain(list(range(9)), Namespace())
    places = [(load.block.group_idx, load.block_idx) for load in archive.find_loads(chain, lambda _: True).loads]
    assert places == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]


def test_what_the_host_has_no_room_for_is_a_shorter_hit() -> None:
    memory, archive = make(num_blocks=8, host_blocks=3)
    chain = memory.chain(list(range(13)), Namespace())
    plan = archive.find_loads(chain, lambda _: True)
    assert plan.num_blocks == len(plan.loads) == 3
    fetched = [FetchedBlock(0, load.block_idx, load.block_idx) for load in plan.loads]
    # More than was named: the first that there is room for.
    assert archive.publish_loaded(chain, 4, [*fetched, FetchedBlock(0, 3, 3)]) == [0, 1, 2]
    check(memory)


def test_at_the_end_all_that_is_published_can_be_saved() -> None:
    memory, archive = make(num_blocks=4, host_blocks=2)
    for seq_id in range(1, 4):
        enter(memory, seq_id, [seq_id] * 4)
    memory.take_ops()
    chain = memory.chain([3] * 5, Namespace())
    memory.allocate(9, chain, memory.match_prefix(chain))
    ops = archive.saving_ops()
    assert archive.saving_ops() == ops
    assert [copy.src_tier for copy in ops.copies] == [Tier.HOST] * 2 + [Tier.DEVICE] * 4
    assert [copy.dst_id for copy in ops.copies] == list(range(6))
    assert len(set(ops.saves)) == 6
    # What a sequence holds is worth most.
    assert {copy.src_id for copy in ops.copies[4:]} == set(memory.block_table(9))


def test_a_long_walk_loads_and_saves() -> None:
    world = World(WorldSize(4, 2, host_blocks=3, has_disk=True))
    rng = random.Random(1)
    assert world.disk is not None
    num_loads = 0
    for seq_id in range(1, 60):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(2, 8))]
        num_loads += world.disk.load(prompt, Namespace())
        world.enter(seq_id, prompt)
        world.free(seq_id)
    assert world.disk.num_saves > 20
    assert num_loads == world.disk.archive.num_loads > 5
