"""Bugs put in on purpose into what memory does with states, and the nets that must catch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.memory import KVCacheManager, RecurrentState, manager
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.snapshots import Snapshots
from quire.memory.tables.tables import BlockTables
from tests.memory.nets import (
    TEARS,
    audited_run,
    each_net,
    invariants_and_reading_back,
    long_run,
    slow_twin,
    state_world,
)

Patch = pytest.MonkeyPatch


def write_a_published_state_in_place(patch: Patch) -> None:
    patch.setattr(BlockTables, "_is_published", lambda *_: False)


def write_a_shared_state_in_place(patch: Patch) -> None:
    honest = BlockTables._shared

    def shared(tables: BlockTables, state: SequenceBlocks, members: Any, checkpoint: Any = None) -> list[int]:
        return [idx for idx in honest(tables, state, members, checkpoint) if idx in tables.token_groups]

    patch.setattr(BlockTables, "_shared", shared)


def carry_no_state_along(patch: Patch) -> None:
    """A table that grows at its end, so that the state stays behind."""

    def copy_blocks(tables: BlockTables, state: SequenceBlocks, group_idx: int) -> None:
        table = state.tables[group_idx]
        while len(table) < tables.groups[group_idx].spec.num_blocks(state.num_slots):
            state.mark_dirty(group_idx, len(table))
            table.append(NULL_BLOCK)

    patch.setattr(BlockTables, "_move_state", copy_blocks)


def publish_states_of_other_lengths(patch: Patch) -> None:
    """A snapshot for each full block, whatever tokens the state sums up."""
    honest = manager.publish_blocks

    def publish(groups: Any, state: SequenceBlocks, num_full: int) -> int:
        num_merges = honest(groups, state, num_full)
        for idx, group in enumerate(groups):
            index = group.pool.index
            if group.spec.is_recurrent and index.tree.insert(state.chain, num_full, 0) == num_full:
                place = index.tree.match(state.chain, num_full).position(num_full - 1)
                if not index.at(place):
                    index.put(place, state.tables[idx][-1])
        return num_merges

    patch.setattr(manager, "publish_blocks", publish)


def step_past_the_snapshots(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "step_limit", lambda *args: args[-1])


def lose_the_checkpoint(patch: Patch) -> None:
    """A state that is to go back to, but is held by nobody."""

    def hold(_: BlockTables, state: SequenceBlocks, checkpoint: Any) -> None:
        state.checkpoint = checkpoint

    patch.setattr(BlockTables, "_hold", hold)


def leak_the_checkpoint(patch: Patch) -> None:
    def drop(_: BlockTables, state: SequenceBlocks) -> None:
        state.checkpoint = None

    patch.setattr(BlockTables, "drop_checkpoint", drop)


def go_back_to_the_present_state(patch: Patch) -> None:
    """A rollback that keeps what was looked ahead in the state."""

    def go_back(tables: BlockTables, state: SequenceBlocks) -> None:
        if state.checkpoint is not None:
            for idx in tables.recurrent_groups:
                num_skipped = state.num_skipped[idx] = max(
                    0, tables.groups[idx].spec.num_blocks(state.checkpoint.num_tokens) - 1
                )
                state.tables[idx] = [NULL_BLOCK] * num_skipped + state.tables[idx][-1:]
                state.mark_dirty(idx, 0)
            tables.drop_checkpoint(state)

    patch.setattr(BlockTables, "_restore_state", go_back)


def hit_states_that_are_not_there(patch: Patch) -> None:
    patch.setattr(RecurrentState, "longest_hit", lambda *args: args[-1])


def keep_snapshots_before_later_ones(patch: Patch) -> None:
    """Regular snapshots are evicted like the last one."""
    patch.setattr(Snapshots, "_supersede", lambda *_: None)


CAUGHT: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (write_a_published_state_in_place, (invariants_and_reading_back, slow_twin, state_world, long_run, audited_run)),
    (write_a_shared_state_in_place, (invariants_and_reading_back, slow_twin, state_world, long_run, audited_run)),
    (carry_no_state_along, (invariants_and_reading_back, slow_twin, state_world, long_run, audited_run)),
    (publish_states_of_other_lengths, (invariants_and_reading_back, slow_twin, state_world, audited_run)),
    (step_past_the_snapshots, (slow_twin, state_world)),
    (lose_the_checkpoint, (invariants_and_reading_back, slow_twin, state_world)),
    (leak_the_checkpoint, (invariants_and_reading_back, slow_twin, state_world)),
    (go_back_to_the_present_state, (invariants_and_reading_back, slow_twin, state_world)),
    (keep_snapshots_before_later_ones, (slow_twin,)),
    (hit_states_that_are_not_there, (invariants_and_reading_back, slow_twin, long_run, audited_run)),
]


@pytest.mark.parametrize(("seed_bug", "net"), each_net(CAUGHT))
def test_the_net_catches_the_bug(
    monkeypatch: pytest.MonkeyPatch, seed_bug: Callable[[Patch], None], net: Callable[[], None]
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises(TEARS):
        net()
