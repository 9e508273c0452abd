"""KV events: who applies them knows the published blocks of every group and tier, whatever the commands were."""

from __future__ import annotations

import random

import pytest

from quire.fleet.routing.shadow_tree import Scope, ShadowTree, bit_of
from quire.memory import FullAttention, KVCacheManager, MediaSpan, Namespace
from quire.memory.kv_events import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventCollector,
    encode,
    hash_of,
)
from quire.memory.prefix.token_chain import TOKEN_BYTES
from quire.memory.results import Tier
from tests.memory.million import random_world
from tests.memory.walk import random_walk
from tests.memory.world import World

# A block as a consumer knows it: hash, group, medium.
Known = tuple[int, int, str]


class Consumer:
    """A slow consumer of events: a plain set of blocks, with the tokens and the parent of each."""

    def __init__(self) -> None:
        self.blocks: set[Known] = set()
        self.contents: dict[int, tuple[int | None, bytes]] = {}

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                size = event.block_size * TOKEN_BYTES
                for idx, name in enumerate(event.block_hashes):
                    block = (name, event.group_idx, event.medium)
                    assert block not in self.blocks, "a block is stored twice"
                    self.blocks.add(block)
                    content = (parent, event.tokens[idx * size : (idx + 1) * size])
                    assert self.contents.setdefault(name, content) == content
                    parent = name
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self.blocks.remove((name, event.group_idx, event.medium))
            else:
                self.blocks.clear()


def published(manager: KVCacheManager) -> dict[Known, tuple[int | None, bytes]]:
    """Return the published blocks of a manager, each with the hash of its parent and its tokens."""
    found: dict[Known, tuple[int | None, bytes]] = {}
    for tier in (Tier.DEVICE, Tier.HOST):
        if tier is Tier.HOST and manager.host is None:
            continue
        for group_idx, group in enumerate(manager.tables.groups_on(tier)):
            for block_id in group.pool.index.block_ids():
                where = group.pool.index.position_of(block_id)
                assert where is not None
                node, position = where
                parent = hash_of(node.digest_before(position)) if node.first + position else None
                size = node.layout.block_bytes
                tokens = bytes(node.data[position * size : (position + 1) * size])
                found[hash_of(node.digest(position)), group_idx, MEDIA[tier]] = (parent, tokens)
    return found


def follow(world: World, seed: int, num_turns: int) -> int:
    """Walk through a world and compare what consumers know with the manager after every command.

    Returns:
        The number of events.
    """
    collector = KVEventCollector(world.manager)
    consumer, tree, num_events = Consumer(), ShadowTree(), 0
    tree.add_replica(0, world.size.block_size)
    has_tokens = any(not group.is_recurrent for group in world.manager.groups)
    verify = world.verify

    def verify_all() -> None:
        nonlocal num_events
        verify()
        events = collector.take_events()
        num_events += len(events)
        consumer.apply(events)
        tree.apply(0, events)
        truth = published(world.manager)
        assert consumer.blocks == set(truth)
        assert all(consumer.contents[name] == content for (name, _, _), content in truth.items())
        if has_tokens:
            masks: dict[int, int] = {}
            for name, group_idx, medium in truth:
                masks[name] = masks.get(name, 0) | bit_of(group_idx, medium)
            assert tree.contents(0) == masks
            assert not tree.replicas[0].num_unplaced

    world.verify = verify_all  # type: ignore[method-assign]
    random_walk(world, random.Random(seed), num_turns)
    late = Consumer()
    late.apply(collector.snapshot())
    assert late.blocks == set(published(world.manager))
    return num_events


@pytest.mark.parametrize("seed", range(30))
def test_consumers_know_the_published_blocks_after_every_command(seed: int) -> None:
    follow(random_world(random.Random(seed)), seed, 120)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.slow if seed < 130 else pytest.mark.exhaustive) for seed in range(30, 330)],
)
def test_consumers_know_the_published_blocks_after_every_command_of_longer_walks(seed: int) -> None:
    follow(random_world(random.Random(seed)), seed, 400)


def manager_of(num_blocks: int = 8, host_bytes: int = 0) -> KVCacheManager:
    return KVCacheManager([FullAttention(block_size=2)], num_blocks, host_bytes=host_bytes)


def run(manager: KVCacheManager, seq_id: int, tokens: list[int], namespace: Namespace, media: list[MediaSpan]) -> None:
    """Compute a sequence and end it."""
    chain = manager.chain(tokens, namespace, media)
    hit = manager.match_prefix(chain)
    manager.allocate(seq_id, chain, hit)
    assert manager.append_slots([seq_id], len(tokens) - hit.num_tokens) == 1
    manager.publish(seq_id, len(tokens))
    manager.free(seq_id)


def test_an_event_has_what_the_blocks_depend_on() -> None:
    manager = manager_of()
    collector = KVEventCollector(manager, {"d1g3st": "sql"}.__getitem__)
    namespace = Namespace("model", "d1g3st", "salt", "blue")
    run(manager, 0, [1, 2, 3, 4, 5], namespace, [MediaSpan(2, 1, b"\xab")])
    whole, tail = collector.take_events()
    assert isinstance(whole, BlockStored)
    assert isinstance(tail, BlockStored)
    assert whole.token_ids == [1, 2, 3, 4]
    assert (whole.parent_block_hash, whole.block_size, whole.adapter, whole.medium) == (None, 2, "sql", "GPU")
    assert whole.extra_keys == (("salt", ("tenant", "blue")), (("ab", 0),))
    assert (tail.token_ids, tail.block_size, tail.extra_keys) == ([5], 1, None)
    assert tail.parent_block_hash == whole.block_hashes[1]


def test_equal_prefixes_have_equal_hashes_and_others_differ() -> None:
    manager = manager_of()
    collector = KVEventCollector(manager)
    run(manager, 0, [1, 2, 3, 4], Namespace(), [])
    run(manager, 1, [1, 2, 5, 6], Namespace(), [])
    run(manager, 2, [1, 2], Namespace(tenant="other"), [])
    one, two, three = collector.take_events()
    assert isinstance(one, BlockStored)
    assert isinstance(two, BlockStored)
    assert isinstance(three, BlockStored)
    assert two.parent_block_hash == one.block_hashes[0]
    assert three.block_hashes != one.block_hashes[:1]


def test_evicted_blocks_are_stored_on_the_host_before_they_are_removed_from_the_device() -> None:
    manager = manager_of(2, host_bytes=1 << 10)
    collector = KVEventCollector(manager)
    run(manager, 0, [1, 2, 3, 4], Namespace(), [])
    collector.take_events()
    run(manager, 1, [5, 6, 7, 8], Namespace(), [])
    kinds = [(type(event), getattr(event, "medium", "")) for event in collector.take_events()]
    assert kinds.index((BlockStored, "CPU")) < kinds.index((BlockRemoved, "GPU"))


def test_a_reset_is_one_event() -> None:
    manager = manager_of(4, host_bytes=1 << 10)
    collector = KVEventCollector(manager)
    run(manager, 0, [1, 2, 3, 4], Namespace(), [])
    collector.take_events()
    manager.reset_prefix_cache()
    assert collector.take_events() == [AllBlocksCleared()]


def test_a_shadow_tree_finds_what_the_manager_finds() -> None:
    """Hits agree in whole blocks and within a block, for the namespace of the request only."""
    rng = random.Random(5)
    manager = KVCacheManager([FullAttention(block_size=4)], 24)
    collector, tree = KVEventCollector(manager), ShadowTree()
    tree.add_replica(0)
    namespaces = [Namespace(), Namespace(cache_salt="s"), Namespace(tenant="t"), Namespace(adapter="a")]
    num_hits = 0
    for seq_id in range(400):
        namespace = rng.choice(namespaces)
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        scope = Scope(namespace.adapter, namespace.cache_salt, namespace.tenant)
        encoded = encode(tokens)
        path = tree.path(encoded, scope, 4)
        expected = manager.match_prefix(manager.chain(tokens, namespace)).num_tokens
        assert tree.hit(0, path, encoded, scope).num_tokens == expected
        num_hits += expected > 0
        run(manager, seq_id, tokens, namespace, [])
        tree.apply(0, collector.take_events())
    assert num_hits > 200
