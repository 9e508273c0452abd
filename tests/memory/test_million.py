"""A short stretch of the million random commands; `python -m tests.memory.million` walks all of it."""

from __future__ import annotations

import random

import pytest

from quire.memory import Tier
from quire.memory.tables.tables import BlockTables
from tests.memory.million import walk
from tests.memory.twin_pages import Kind
from tests.memory.walk import random_walk
from tests.memory.world import World
from tests.memory.world_size import WorldSize


def test_random_commands_in_worlds_of_all_kinds() -> None:
    assert sum(walk((1 << 32) + idx) for idx in range(10)) > 1_000


def test_a_partial_hit_loads_no_block_that_it_evicts() -> None:
    """A walk that once found a load for a block that was dead at the end of the longer hit."""
    assert walk(100395) > 0


def test_a_violation_names_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockTables, "_copy_on_write", lambda *_: None)
    with pytest.raises(AssertionError, match="the walk with seed"):
        sum(map(walk, range(40)))


def test_blocks_of_different_sizes_move_together_on_the_host() -> None:
    class WatchedWorld(World):
        num_moves = 0

        def perform_copies(self) -> None:
            self.num_moves += [(copy.src_tier, copy.dst_tier) for copy in self.slots.pending].count(
                (Tier.HOST, Tier.HOST)
            )
            super().perform_copies()

    size = WorldSize(0, 2, kinds=(Kind(), Kind()), layers=(1, 3), num_bytes=432, host_bytes=288)
    num_moves = 0
    for seed in range(2):
        world = WatchedWorld(size, has_twin=False)
        random_walk(world, random.Random(seed), 250, max_sequences=6)
        num_moves += world.num_moves
    assert num_moves > 0
