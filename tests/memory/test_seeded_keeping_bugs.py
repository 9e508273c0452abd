"""Bugs in pins and in what is evicted last, put in on purpose, and the nets that must catch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import InvariantViolation
from quire.memory.pins import Pins
from quire.memory.retention import HintedLast, Retention
from tests.memory.nets import each_net, hinted_world, invariants_and_reading_back, slow_twin

Patch = pytest.MonkeyPatch


def evict_hinted_blocks_first(patch: Patch) -> None:
    def victims(idle: HintedLast, count: int) -> list[int]:
        num_hinted = min(count, len(idle._hinted))
        return idle._hinted.victims(num_hinted) + idle._plain.victims(count - num_hinted)

    patch.setattr(HintedLast, "victims", victims)


def return_hinted_slabs_like_others(patch: Patch) -> None:
    patch.setattr(Retention, "is_in_slab", lambda *_: False)


def hint_without_a_limit(patch: Patch) -> None:
    patch.setattr(Retention, "limit_bytes", 1 << 60)


def keep_the_hint_of_an_evicted_block(patch: Patch) -> None:
    def forget(idle: HintedLast, block_ids: Any) -> None:
        idle._plain.forget(block_ids)
        idle._hinted.forget(block_ids)

    patch.setattr(HintedLast, "forget", forget)


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
    (return_hinted_slabs_like_others, (invariants_and_reading_back, slow_twin)),
    (hint_without_a_limit, (slow_twin, hinted_world)),
    (keep_the_hint_of_an_evicted_block, (invariants_and_reading_back, slow_twin, hinted_world)),
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
    with pytest.raises((AssertionError, InvariantViolation, LookupError)):
        net()
