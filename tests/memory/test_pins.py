"""Pinned prefixes: held by name, counted and limited."""

from __future__ import annotations

import random

import pytest

from quire.errors import InvariantViolation
from quire.memory import TokenChain, Verdict, check
from quire.memory.invariants import snapshot
from quire.memory.pins import Pins
from tests.memory.twin_pages import Kind
from tests.memory.walk import random_walk
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize


def world_of(num_blocks: int, pin_limit: int, kinds: tuple[Kind, ...] = (Kind(),)) -> World:
    return World(WorldSize(num_blocks, 2, kinds=kinds, pins=pin_limit), has_twin=False)


def chain_of(world: World, tokens: list[int]) -> TokenChain:
    return world.manager.chain(tokens, NAMESPACES[0])


def test_what_is_pinned_is_not_evicted() -> None:
    world = world_of(6, 2)
    world.enter(1, [0] * 4)
    world.free(1)
    assert world.manager.pin("system", chain_of(world, [0] * 4)) == 4
    assert world.enter(2, [1] * 8)
    world.free(2)
    assert world.manager.match_prefix(chain_of(world, [0] * 5)).num_tokens == 4
    world.manager.unpin("system")
    check(world.manager)
    assert world.manager.usage().used == 0


def test_pins_keep_to_their_limit_and_change_nothing_beyond_it() -> None:
    world = world_of(6, 2)
    world.enter(1, [0] * 6)
    before = snapshot(world.manager)
    assert world.manager.pin("a", chain_of(world, [0] * 6)) == 0
    assert snapshot(world.manager) == before
    assert world.manager.pin("a", chain_of(world, [0] * 5)) == 4
    assert world.manager.pin("b", chain_of(world, [0] * 4)) == 4, "the same blocks count once"
    assert world.manager.pin("c", chain_of(world, [1] * 4)) == 0, "nothing is published"
    world.refuses(ValueError, lambda: world.manager.pin("a", chain_of(world, [0] * 4)))
    world.refuses(KeyError, lambda: world.manager.unpin("c"))
    check(world.manager)


def test_what_does_not_fit_beside_pins_is_refused_for_ever() -> None:
    world = world_of(6, 2)
    hit = world.manager.match_prefix(chain_of(world, [0] * 9))
    assert world.manager.capacity.can_allocate(8, hit).verdict is Verdict.OK
    assert world.manager.capacity.can_allocate(9, hit) == (Verdict.NEVER, 0, 5, 4)
    assert not world.manager.capacity.can_ever_hold(9)


def test_nothing_is_pinned_where_nothing_can_be_hit() -> None:
    # A prefix that ends with a chunk needs no block, so it is a hit, without any, wherever its last one is published.
    for caching, num_tokens in ((True, 2), (False, 0)):
        world = World(WorldSize(4, 1, kinds=(Kind("chunk", 2),), caching=caching, pins=1))
        assert world.pin("a", [0, 0]) == 0
        world.enter(1, [0, 0])
        world.free(1)
        assert world.pin("a", [0, 0]) == num_tokens


@pytest.mark.parametrize("kinds", [(Kind(),), (Kind(), Kind("window", 3))])
@pytest.mark.parametrize("seed", range(6))
def test_random_commands_beside_pins(kinds: tuple[Kind, ...], seed: int) -> None:
    world = world_of(8, 4, kinds)
    rng = random.Random(seed)
    for round_idx in range(6):
        random_walk(world, rng, 20)
        tokens = [rng.randrange(2) for _ in range(6)]
        world.enter(1000 + round_idx, tokens)
        world.manager.pin(str(round_idx), chain_of(world, tokens))
        if 1000 + round_idx in world.tokens:
            world.free(1000 + round_idx)
        check(world.manager)
        if rng.random() < 0.5 and str(round_idx) in world.manager.pins:
            world.manager.unpin(str(round_idx))


def test_a_pin_that_is_not_counted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(6, 3)
    world.enter(1, [0] * 6)
    monkeypatch.setattr(Pins, "blocks", lambda *_: iter(()))
    world.manager.pin("a", chain_of(world, [0] * 6))
    with pytest.raises(InvariantViolation, match="M2"):
        check(world.manager)
