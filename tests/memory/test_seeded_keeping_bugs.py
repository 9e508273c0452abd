"""Bugs in pins and in what is evicted last, put in on purpose, and the nets that must catch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.memory import manager
from quire.memory.groups import match as hit
from quire.memory.pins import Pins
from quire.memory.pool.idle_blocks import IdleBlocks, Part, RetentionPriority
from quire.memory.pool.pool import BlockPool
from quire.memory.pool.retention import Retention
from quire.memory.results import Tier
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.tables import BlockTables
from tests.memory.nets import TEARS, each_net, hinted_world, invariants_and_reading_back, slow_twin

Patch = pytest.MonkeyPatch


def evict_hinted_blocks_first(patch: Patch) -> None:
    def victims(idle: IdleBlocks, count: int) -> list[int]:
        low, default, high = idle.queues
        return [*low, *high, *default][:count]

    patch.setattr(IdleBlocks, "victims", victims)


def keep_hinted_blocks_like_others(patch: Patch) -> None:
    def split(_: IdleBlocks, block_ids: Any, moments: Any) -> list[Part]:
        return [Part(RetentionPriority.DEFAULT, block_ids, moments)]

    patch.setattr(IdleBlocks, "_split_by_hint", split)


def hint_without_a_limit(patch: Patch) -> None:
    patch.setattr(Retention, "limit_bytes", 1 << 60)


def keep_the_hint_of_an_evicted_block(patch: Patch) -> None:
    patch.setattr(IdleBlocks, "forget", lambda *_: None)


def keep_blocks_behind_a_window(patch: Patch) -> None:
    """What has died is evicted like all else, behind what other sequences left before."""
    honest = BlockPool.release

    def release(pool: BlockPool, block_ids: Any, _: Any = None, moments: Any = None) -> None:
        honest(pool, block_ids, moments=moments)

    patch.setattr(BlockPool, "release", release)


def forget_where_prompts_part(patch: Patch) -> None:
    """What the next prompt that parts reads goes first too."""
    patch.setattr(hit, "_diverged_at", lambda *_: 0)


def let_the_last_whole_block_lack_its_window(patch: Patch) -> None:
    """A sequence that ends inside a block leaves no hit of whole blocks."""
    patch.setattr(manager, "retain_for_next_turn", lambda *_: None)


def release_group_by_group(patch: Patch) -> None:
    """All blocks of one group are older than those of the next."""

    def release(tables: BlockTables, state: SequenceBlocks, tier: Tier = Tier.DEVICE, *args: Any) -> None:
        for group, table in zip(tables.groups_on(tier), state.tables_on(tier), strict=True):
            group.pool.release([block_id for block_id in reversed(table) if block_id], *args)
        if tier is Tier.DEVICE:
            tables.drop_checkpoint(state)

    patch.setattr(BlockTables, "release", release)


def drop_the_newest_hint(patch: Patch) -> None:
    """A hint that is given anew but keeps its age."""
    honest = Retention.add

    def add(retention: Retention, group_idx: int, block_id: int) -> list[tuple[int, int]]:
        return [] if block_id in retention.of_group[group_idx] else honest(retention, group_idx, block_id)

    patch.setattr(Retention, "add", add)


def evict_what_is_pinned(patch: Patch) -> None:
    """A pin that holds no blocks."""

    def add(pins: Pins, name: str, block_ids: Any, num_tokens: int) -> None:
        pins._tokens[name] = num_tokens
        pins._tables[name] = [[block_id for block_id in blocks if block_id] for blocks in block_ids]

    patch.setattr(Pins, "add", add)


def pin_without_a_limit(patch: Patch) -> None:
    patch.setattr(Pins, "can_add", lambda *_: True)


def keep_pins_at_a_reset(patch: Patch) -> None:
    patch.setattr(Pins, "clear", lambda _: None)


CAUGHT: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (evict_hinted_blocks_first, (slow_twin, hinted_world)),
    (keep_hinted_blocks_like_others, (invariants_and_reading_back, slow_twin)),
    (hint_without_a_limit, (slow_twin, hinted_world)),
    (keep_the_hint_of_an_evicted_block, (invariants_and_reading_back, slow_twin, hinted_world)),
    (keep_blocks_behind_a_window, (slow_twin,)),
    (forget_where_prompts_part, (slow_twin,)),
    (let_the_last_whole_block_lack_its_window, (slow_twin,)),
    (release_group_by_group, (slow_twin,)),
    (drop_the_newest_hint, (slow_twin,)),
    (evict_what_is_pinned, (invariants_and_reading_back, slow_twin, hinted_world)),
    (pin_without_a_limit, (slow_twin,)),
    (keep_pins_at_a_reset, (slow_twin, hinted_world)),
]


@pytest.mark.parametrize(("seed_bug", "net"), each_net(CAUGHT))
def test_the_net_catches_the_bug(
    monkeypatch: pytest.MonkeyPatch, seed_bug: Callable[[Patch], None], net: Callable[[], None]
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises(TEARS):
        net()
