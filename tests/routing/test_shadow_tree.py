"""The shadow tree: hits of every kind of cache, tiers, replicas that share nodes; nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator

from quire.fleet.routing.shadow_tree import MIN_TOMBSTONES, NO_HIT, Hit, Scope, ShadowTree
from quire.memory import ChunkedLocal, FullAttention, KVCacheManager, KVCacheSpec, Namespace, RecurrentState
from quire.memory.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventCollector, encode
from quire.memory.specs import SlidingWindow

TOKENS = list(range(100, 113))
NO_SCOPE = Scope()


def stored(start: int, end: int, *, medium: str = "GPU", size: int = 4, **fields: object) -> BlockStored:
    """Return the event for blocks of `TOKENS`, named 1, 2, 3, ..."""
    event = BlockStored(
        tuple(range(start + 1, end + 1)), start or None, encode(TOKENS[start * size : end * size]), size, medium
    )
    return event._replace(**fields)  # type: ignore[arg-type]


def hit(tree: ShadowTree, replica: int, tokens: list[int], scope: Scope = NO_SCOPE) -> Hit:
    encoded = encode(tokens)
    return tree.hit(replica, tree.path(encoded, scope, 4), encoded, scope)


def tree_of(num_replicas: int = 1) -> ShadowTree:
    tree = ShadowTree()
    for replica in range(num_replicas):
        tree.add_replica(replica)
    return tree


def test_a_hit_leaves_a_token_to_compute() -> None:
    tree = tree_of()
    tree.apply(0, [stored(0, 3)])
    assert hit(tree, 0, TOKENS).num_tokens == 12
    assert hit(tree, 0, TOKENS[:12]).num_tokens == 11


def test_replicas_have_their_own_blocks_and_share_the_nodes() -> None:
    tree = tree_of(2)
    tree.apply(0, [stored(0, 3)])
    tree.apply(1, [stored(0, 2)])
    assert tree.num_nodes == 4
    assert [hit(tree, replica, TOKENS).num_tokens for replica in (0, 1)] == [12, 8]
    tree.apply(0, [BlockRemoved((2,), "GPU")])
    assert [hit(tree, replica, TOKENS).num_tokens for replica in (0, 1)] == [4, 8]
    tree.remove_replica(0)
    assert [tree.num_nodes, hit(tree, 1, TOKENS).num_tokens] == [3, 8]
    tree.apply(1, [AllBlocksCleared()])
    assert tree.num_nodes == 1


def test_lower_tiers_hit_for_less() -> None:
    tree = tree_of()
    tree.apply(0, [stored(0, 1), stored(1, 2, medium="CPU"), stored(2, 3, medium="STORAGE")])
    assert hit(tree, 0, TOKENS) == (12, 4 * (1.0 + 0.9 + 0.5))
    tree.apply(0, [stored(2, 3), BlockRemoved((3,), "STORAGE")])
    assert hit(tree, 0, TOKENS) == (12, 4 * (1.0 + 0.9 + 1.0))
    tree.apply(0, [stored(0, 3, medium="TAPE"), *(BlockRemoved((1, 2, 3), medium) for medium in ("GPU", "CPU"))])
    assert hit(tree, 0, TOKENS) == (12, 4 * (0.5 + 0.5 + 0.5)), "a tier that is not known counts as the lowest"


def test_scopes_share_nothing() -> None:
    tree = tree_of()
    tree.apply(0, [stored(0, 1, adapter="sql", extra_keys=(("salt", ("tenant", "blue")),))])
    assert hit(tree, 0, TOKENS, Scope("sql", "salt", "blue")).num_tokens == 4
    for scope in (Scope(), Scope("sql", "salt"), Scope("sql", None, "blue"), Scope(None, "salt", "blue")):
        assert hit(tree, 0, TOKENS, scope) == NO_HIT


def test_a_block_with_media_is_no_block_of_its_tokens() -> None:
    tree = tree_of()
    tree.apply(0, [stored(0, 1, extra_keys=((("ab", 1),),))])
    assert hit(tree, 0, TOKENS).num_tokens <= 1


def test_a_tail_is_hit_as_far_as_it_goes() -> None:
    tree = tree_of()
    tree.apply(0, [stored(0, 2), BlockStored((9,), 2, encode(TOKENS[8:10]), 2, "GPU")])
    assert hit(tree, 0, TOKENS).num_tokens == 10
    assert hit(tree, 0, [*TOKENS[:9], 1, 2, 3]).num_tokens == 9


def test_blocks_of_an_unknown_parent_are_counted_and_not_used() -> None:
    tree = tree_of()
    tree.apply(0, [stored(1, 3)])
    assert hit(tree, 0, TOKENS) == NO_HIT
    assert tree.replicas[0].num_unplaced == 2


def test_of_blocks_that_were_removed_some_are_remembered() -> None:
    """Behind one of them a block may still be stored; those of the longest ago are not known any more."""
    tree = tree_of()
    tree.apply(0, [BlockStored((name,), None, encode([name] * 4), 4, "GPU") for name in range(100)])
    tree.apply(0, [BlockRemoved((200, *range(100)), "GPU")])
    assert (tree.num_blocks(0), tree.num_nodes) == (0, 1 + MIN_TOMBSTONES)
    for name, is_known in ((0, False), (99, True)):
        before = tree.replicas[0].num_unplaced
        tree.apply(0, [BlockStored((name + 1000,), name, encode([5] * 4), 4, "GPU")])
        assert (tree.replicas[0].num_unplaced == before) is is_known


def specs() -> Iterator[list[KVCacheSpec]]:
    full, window = FullAttention(block_size=4), SlidingWindow(block_size=4, window=6)
    yield [full]
    yield [window]
    yield [ChunkedLocal(block_size=4, chunk=8)]
    yield [full, window]
    yield [full, RecurrentState(block_size=4, layer_bytes=16)]


def test_hits_are_those_of_the_manager_for_every_kind_of_cache() -> None:
    for groups in specs():
        manager = KVCacheManager(groups, 40)
        collector, tree, rng = KVEventCollector(manager), tree_of(), random.Random(1)
        num_hits, has_parts = 0, len(groups) == 1 and isinstance(groups[0], FullAttention)
        for seq_id in range(300):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
            chain = manager.chain(tokens, Namespace())
            found = manager.match_prefix(chain)
            expected = found.num_tokens if has_parts else found.num_tokens // 4 * 4
            assert hit(tree, 0, tokens).num_tokens // (1 if has_parts else 4) * (1 if has_parts else 4) == expected
            num_hits += expected > 0
            manager.allocate(seq_id, chain, found)
            while manager.sequences[seq_id].num_slots < len(tokens):
                left = len(tokens) - manager.sequences[seq_id].num_slots
                assert manager.append_slots([seq_id], manager.step_limit(seq_id, left))
                manager.publish(seq_id, manager.sequences[seq_id].num_slots)
            manager.free(seq_id)
            tree.apply(0, collector.take_events())
        assert num_hits > 100
