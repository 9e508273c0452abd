"""Bugs put into the host tier on purpose, and the nets that must catch them; see `test_seeded_bugs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.memory import BlockCopy, Tier, manager
from quire.memory.capacity import admission
from quire.memory.groups.host_tier import HostSink
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.idle_queue import IdleQueue
from quire.memory.pool.pool import BlockPool
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.tables import BlockTables
from quire.memory.tiers import swap
from tests.memory.nets import TEARS, each_net, host_reading_back, host_twin, host_world

Patch = pytest.MonkeyPatch


def lose_a_swap_mapping(patch: Patch) -> None:
    """A sequence whose blocks are all there, but in other places of its table."""
    honest = swap.swap_out

    def swap_out(tables: BlockTables, seq_ids: Any) -> None:
        honest(tables, seq_ids)
        for seq_id in seq_ids:
            for table in tables.sequences[seq_id].host_tables or ():
                table[:] = table[1:] + table[:1]

    patch.setattr(swap, "swap_out", swap_out)


def share_nothing_on_the_way_back(patch: Patch) -> None:
    """Every sequence of a family gets copies of its own, where the device has room for that."""
    honest = swap.transfer

    def transfer(tables: BlockTables, states: Any, src: Tier, routes: Any) -> int:
        if src is Tier.DEVICE:
            return honest(tables, states, src, routes)
        lonely = [swap.find_routes(tables, [state], src) for state in states]
        needs = [sum(route[idx].num_needed for route in lonely) for idx in range(len(routes))]
        if not tables.arena.fits(needs):
            return honest(tables, states, src, routes)
        return sum(honest(tables, [state], src, swap.find_routes(tables, [state], src)) for state in states)

    patch.setattr(swap, "transfer", transfer)


def free_host_blocks_twice(patch: Patch) -> None:
    honest = swap.release_tier

    def leave(tables: BlockTables, state: SequenceBlocks, src: Tier, *args: Any) -> None:
        last = [table[-1:] for table in state.tables_on(src)]
        honest(tables, state, src, *args)
        if src is Tier.HOST:
            tables.groups_on(src)[0].pool.release([block_id for block_id in last[0] if block_id])

    patch.setattr(swap, "release_tier", leave)


def keep_host_blocks_of_the_freed(patch: Patch) -> None:
    def leave(_: BlockTables, state: SequenceBlocks, *__: Any) -> None:
        state.host_tables = None

    patch.setattr(manager.swap, "release_tier", leave)


def demote_what_is_evicted_first(patch: Patch) -> None:
    """Blocks behind a window are copied to the host."""
    honest = HostSink.keep

    def keep(demotion: HostSink, block_ids: Any) -> None:
        queues = demotion._pool.idle.queues
        demotion._pool.idle.queues = (IdleQueue(), *queues[1:])
        honest(demotion, block_ids)
        demotion._pool.idle.queues = queues

    patch.setattr(HostSink, "keep", keep)


def keep_what_the_device_has_too(patch: Patch) -> None:
    """Blocks that came back from the host are evicted there like others."""
    patch.setattr(swap, "_priority_left", lambda _: RetentionPriority.DEFAULT)


def demote_without_copying(patch: Patch) -> None:
    honest = HostSink.keep

    def keep(demotion: HostSink, block_ids: Any) -> None:
        moves = demotion._host.arena.moves
        before = list(moves)
        honest(demotion, block_ids)
        moves[:] = before + [move for move in moves[len(before) :] if move.src_tier is move.dst_tier]

    patch.setattr(HostSink, "keep", keep)


def demote_after_the_block_is_taken(patch: Patch) -> None:
    """Movements in the wrong order: what moves within a tier first."""
    honest = BlockTables.take

    def take(tables: BlockTables, group_idx: int, count: int, tier: Tier = Tier.DEVICE) -> list[int]:
        start = len(tables.pending_copies)
        block_ids = honest(tables, group_idx, count, tier)
        tables.pending_copies[start:] = sorted(
            tables.pending_copies[start:], key=lambda move: move.src_tier is not move.dst_tier
        )
        return block_ids

    patch.setattr(BlockTables, "take", take)


def promote_without_publishing(patch: Patch) -> None:
    honest = swap.load_hit

    def load_hit(tables: BlockTables, state: SequenceBlocks, loads: Any) -> None:
        honest(tables, state, loads)
        for load in loads:
            tables.groups[load.group_idx].pool.withdraw(state.tables[load.group_idx][load.block_idx])

    patch.setattr(swap, "load_hit", load_hit)


def forget_that_host_blocks_moved(patch: Patch) -> None:
    honest = BlockTables._apply_move

    def follow(tables: BlockTables, move: BlockCopy) -> None:
        if move.src_tier is Tier.DEVICE:
            honest(tables, move)

    patch.setattr(BlockTables, "_apply_move", follow)


def find_on_the_host_what_a_reset_forgot(patch: Patch) -> None:
    honest = BlockPool.reset

    def reset(pool: BlockPool) -> None:
        if pool.keeper is not None:  # what the device evicts is kept on the host
            honest(pool)

    patch.setattr(BlockPool, "reset", reset)


def promise_without_the_copies(patch: Patch) -> None:
    """Admission that takes blocks on the host for blocks on the device."""
    patch.setattr(admission, "count_loads", lambda groups, _: [0] * len(groups))


HOST_NETS = (host_reading_back, host_twin, host_world)
CAUGHT: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (lose_a_swap_mapping, (host_reading_back, host_twin)),
    (share_nothing_on_the_way_back, HOST_NETS),
    (free_host_blocks_twice, HOST_NETS),
    (keep_host_blocks_of_the_freed, HOST_NETS),
    (demote_what_is_evicted_first, (host_twin,)),
    (keep_what_the_device_has_too, (host_twin,)),
    (demote_without_copying, HOST_NETS),
    (demote_after_the_block_is_taken, (host_reading_back,)),
    (promote_without_publishing, (host_reading_back, host_twin)),
    (forget_that_host_blocks_moved, (host_reading_back,)),
    (find_on_the_host_what_a_reset_forgot, (host_twin,)),
    (promise_without_the_copies, (host_twin,)),
]


@pytest.mark.parametrize(("seed_bug", "net"), each_net(CAUGHT))
def test_the_net_catches_the_bug(
    monkeypatch: pytest.MonkeyPatch, seed_bug: Callable[[Patch], None], net: Callable[[], None]
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises(TEARS):
        net()
