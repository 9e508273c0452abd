"""Bugs of hits inside blocks and of tails, put in on purpose, and the nets that must catch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.memory import KVCacheManager, PrefixHit, TokenChain, capacity_queries, manager
from quire.memory.capacity import admission
from quire.memory.groups import partial_block
from quire.memory.prefix import token_chain
from quire.memory.prefix.radix_node import RadixNode
from quire.memory.tables.tables import BlockTables
from tests.memory.nets import (
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


def write_into_the_block_that_is_used_in_part(patch: Patch) -> None:
    honest = KVCacheManager.allocate

    def allocate(memory: KVCacheManager, seq_id: int, token_chain: TokenChain, hit: PrefixHit) -> None:
        honest(memory, seq_id, token_chain, hit)
        memory.sequences[seq_id].tail_is_private = True

    patch.setattr(KVCacheManager, "allocate", allocate)


def use_one_token_too_many(patch: Patch) -> None:
    honest = token_chain.num_common

    def num_common(one: bytes, other: bytes) -> int:
        return min(honest(one, other) + 1, len(one) // 4, len(other) // 4)

    patch.setattr(partial_block, "num_common", num_common)


def compare_no_tokens_of_a_part(patch: Patch) -> None:
    patch.setattr(partial_block, "num_common", lambda one, other: min(len(one), len(other)) // 4)


def publish_a_tail_as_a_whole_block(patch: Patch) -> None:
    honest = partial_block.tail_of

    def tail_of(groups: Any, state: Any) -> Any:
        tail = honest(groups, state)
        size = 4 * groups[0].spec.block_size
        return None if tail is None else tail._replace(content=tail.content.ljust(size, b"\0"))

    patch.setattr(partial_block, "tail_of", tail_of)


def hit_a_part_that_only_the_first_group_has(patch: Patch) -> None:
    honest = partial_block._in_every_group

    def in_every_group(groups: Any, *args: Any) -> tuple[int, ...]:
        return honest(groups[:1], *args) * len(groups)

    patch.setattr(partial_block, "_in_every_group", in_every_group)


def promise_without_the_copy(patch: Patch) -> None:
    honest = admission.check_admission
    patch.setattr(
        capacity_queries,
        "check_admission",
        lambda arena, groups, num_tokens, hit, *rest: honest(
            arena, groups, num_tokens, hit._replace(num_copied=0), *rest
        ),
    )


def keep_the_children_of_evicted_blocks(patch: Patch) -> None:
    patch.setattr(RadixNode, "drop_child", lambda *_: None)


def rewrite_what_could_be_kept(patch: Patch) -> None:
    patch.setattr(BlockTables, "_used_in_part", lambda *_: [])


def publish_no_tails(patch: Patch) -> None:
    patch.setattr(manager, "publish_tail", lambda *_: None)


def publish_tails_again_and_again(patch: Patch) -> None:
    """A tail is published though a block has its tokens already."""
    honest = partial_block.longest_partial_match

    def longest(groups: Any, tokens: TokenChain, num_blocks: int, content: bytes) -> Any:
        known = honest(groups, tokens, num_blocks, content)
        return None if known is None else known._replace(num_tokens=0, position=None)

    patch.setattr(partial_block, "longest_partial_match", longest)


CAUGHT: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (write_into_the_block_that_is_used_in_part, NETS),
    (use_one_token_too_many, NETS),
    (compare_no_tokens_of_a_part, NETS),
    (publish_a_tail_as_a_whole_block, (slow_twin, small_world)),
    (hit_a_part_that_only_the_first_group_has, (invariants_and_reading_back, slow_twin, long_run, audited_run)),
    (promise_without_the_copy, (invariants_and_reading_back, slow_twin, small_world)),
    (keep_the_children_of_evicted_blocks, (invariants_and_reading_back, slow_twin, small_world, window_world)),
    (rewrite_what_could_be_kept, (slow_twin, small_world)),
    (publish_no_tails, (slow_twin, small_world)),
    (publish_tails_again_and_again, (slow_twin, small_world)),
]


@pytest.mark.parametrize(("seed_bug", "net"), each_net(CAUGHT))
def test_the_net_catches_the_bug(
    monkeypatch: pytest.MonkeyPatch, seed_bug: Callable[[Patch], None], net: Callable[[], None]
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises(TEARS):
        net()
