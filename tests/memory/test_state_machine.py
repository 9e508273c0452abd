"""Hypothesis against the memory manager: any commands, any order, compared with the slow twin after each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.memory import Verdict
from quire.memory.prefix import token_chain
from tests.memory.host_world import swap_in, swap_out
from tests.memory.media import MEDIA, laid_out
from tests.memory.twin_pages import Kind
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize

MAX_SEQUENCES = 5

tokens = st.lists(st.integers(0, 1), max_size=4)
runs = st.tuples(st.integers(0, 4), st.integers(1, 6), st.sampled_from(MEDIA))
prompts = st.builds(laid_out, st.lists(st.integers(0, 1), min_size=1, max_size=12), st.lists(runs, max_size=2))
kinds = (
    st.just(Kind())
    | st.builds(Kind, st.just("window"), st.integers(1, 9))
    | st.builds(Kind, st.just("chunk"), st.integers(1, 9))
    | st.just(Kind("state"))
)
sizes = st.builds(
    WorldSize,
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 4),
    watermark=st.integers(0, 2),
    caching=st.sampled_from([True, True, True, False]),
    kinds=st.lists(kinds, min_size=1, max_size=3).map(tuple),
    layers=st.just(()),
    num_bytes=st.none(),
    eviction=st.just("lru"),
    pins=st.integers(0, 2),
    retention=st.integers(0, 6),
    host_blocks=st.just(0) | st.integers(1, 12),
    host_bytes=st.just(0),
    has_disk=st.just(False),
    interval=st.none(),
).flatmap(lambda size: st.sampled_from((None, 1, 2)).map(lambda n: size._replace(interval=n and n * size.block_size)))


class MemoryMachine(RuleBasedStateMachine):
    """Commands of owners who interleave as they like; what is asked wrongly must change nothing."""

    has_twin = True
    world: World

    @initialize(size=sizes)
    def begin(self, size: WorldSize) -> None:
        self.world = World(size, has_twin=self.has_twin)
        self.next_id = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.residents()), label="sequence")

    def residents(self) -> list[int]:
        return [seq_id for seq_id in sorted(self.world.tokens) if not self.world.is_swapped(seq_id)]

    def swapped(self) -> list[int]:
        return [seq_id for seq_id in sorted(self.world.tokens) if self.world.is_swapped(seq_id)]

    def settled(self) -> list[int]:
        world = self.world
        return [seq_id for seq_id in self.residents() if world.num_slots(seq_id) == world.num_computed(seq_id)]

    def has_room(self) -> bool:
        return len(self.world.tokens) < MAX_SEQUENCES

    def is_alive(self) -> bool:
        return bool(self.residents())

    # ---- opening ----

    @precondition(has_room)
    @rule(
        prompt=prompts,
        namespace=st.sampled_from(NAMESPACES),
        max_tokens=st.none() | st.integers(0, 12),
        reserved=st.integers(0, 3),
        step=st.none() | st.integers(1, 6),
    )
    def open(self, prompt: list[int], namespace: Any, max_tokens: int | None, reserved: int, step: int | None) -> None:
        """Open on a hit; when memory said OK, the prompt can be computed in steps of that size."""
        self.next_id += 1
        world = self.world
        status = world.open(self.next_id, prompt, namespace, max_tokens=max_tokens, reserved=reserved, step=step)
        if status.verdict is Verdict.OK:
            while missing := len(prompt) - world.num_slots(self.next_id):
                assert world.grow(self.next_id, min(missing, step or missing)), "can_allocate promised too much"
                world.store(self.next_id, world.num_slots(self.next_id) - world.num_computed(self.next_id))

    @precondition(has_room)
    @rule(prompt=prompts, namespace=st.sampled_from(NAMESPACES))
    def enter(self, prompt: list[int], namespace: Any) -> None:
        """Open and store a whole prompt."""
        self.next_id += 1
        self.world.enter(self.next_id, prompt, namespace)

    # ---- living ----

    @precondition(is_alive)
    @rule(data=st.data(), new_tokens=tokens, lookahead=st.integers(1, 5))
    def grow(self, data: st.DataObject, new_tokens: list[int], lookahead: int) -> None:
        """Learn tokens and ask for slots, more or fewer than tokens."""
        seq_id = self.pick(data)
        self.world.tokens[seq_id].extend(new_tokens)
        self.world.grow(seq_id, lookahead)

    @precondition(is_alive)
    @rule(data=st.data(), is_stored=st.booleans())
    def grow_together(self, data: st.DataObject, is_stored: bool) -> None:
        """Advance some sequences together, or none of them."""
        world = self.world
        able = [seq_id for seq_id in self.residents() if not world.is_lookahead(seq_id)]
        if not able:
            return
        seq_ids = data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True), label="lockstep group")
        if world.grow_together(seq_ids) and is_stored:
            for seq_id in seq_ids:
                missing = world.num_slots(seq_id) - len(world.tokens[seq_id])
                world.tokens[seq_id] += [seq_id % 2] * max(0, missing)
                world.store(seq_id, world.num_slots(seq_id) - world.num_computed(seq_id))

    @precondition(is_alive)
    @rule(data=st.data(), lookahead=st.integers(1, 3))
    def look_ahead(self, data: st.DataObject, lookahead: int) -> None:
        """Ask for slots, some of which verification may take back."""
        self.world.grow(self.pick(data), 1, lookahead)

    @precondition(is_alive)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        """Compute some of the tokens that have slots."""
        seq_id = self.pick(data)
        world = self.world
        if world.is_lookahead(seq_id):
            return
        most = min(world.num_slots(seq_id), len(world.tokens[seq_id])) - world.num_computed(seq_id)
        world.store(seq_id, data.draw(st.integers(0, most), label="stored"))

    @precondition(is_alive)
    @rule(data=st.data())
    def store_everything(self, data: st.DataObject) -> None:
        """Compute all tokens that have slots: the common case, and the one that publishes most."""
        seq_id = self.pick(data)
        world = self.world
        if world.is_lookahead(seq_id):
            world.tokens[seq_id] += [0] * (world.num_slots(seq_id) - len(world.tokens[seq_id]))
        world.store(seq_id, min(world.num_slots(seq_id), len(world.tokens[seq_id])) - world.num_computed(seq_id))

    @precondition(lambda self: self.has_room() and self.is_alive())
    @rule(data=st.data(), new_tokens=tokens)
    def fork(self, data: st.DataObject, new_tokens: list[int]) -> None:
        """Fork a sequence whose slots are all written; refuse it while they are not."""
        seq_id = self.pick(data)
        world = self.world
        self.next_id += 1
        if world.num_slots(seq_id) == world.num_computed(seq_id):
            world.fork(seq_id, self.next_id, new_tokens)
        else:
            world.refuses(ValueError, lambda: world.manager.fork(seq_id, self.next_id, []))

    @precondition(is_alive)
    @rule(data=st.data(), keep_tokens=st.booleans())
    def truncate(self, data: st.DataObject, keep_tokens: bool) -> None:
        """Roll back to any length."""
        seq_id = self.pick(data)
        world = self.world
        length = data.draw(st.sampled_from((*world.ways_back(seq_id), world.num_slots(seq_id))), label="length")
        world.truncate(seq_id, length, keep_tokens=keep_tokens)

    @precondition(is_alive)
    @rule(data=st.data())
    def sync(self, data: st.DataObject) -> None:
        """Tell the worker what changed."""
        self.world.sync(self.pick(data))

    @precondition(is_alive)
    @rule(data=st.data(), retain=st.booleans(), is_sound=st.sampled_from([True, True, True, False]))
    def free(self, data: st.DataObject, retain: bool, is_sound: bool) -> None:
        """End a sequence, with or without the hint to evict its blocks last; because a step failed, now and then."""
        self.world.free(self.pick(data), retain=retain, is_sound=is_sound)

    @rule(name=st.sampled_from("ab"), prompt=prompts, namespace=st.sampled_from(NAMESPACES))
    def pin_or_unpin(self, name: str, prompt: list[int], namespace: Any) -> None:
        """Hold a prefix, where it is published and the limit allows, or let go of it."""
        world = self.world
        if name in world.manager.pins:
            world.refuses(ValueError, lambda: world.manager.pin(name, world.manager.chain(prompt, namespace)))
            world.unpin(name)
        else:
            world.refuses(KeyError, lambda: world.manager.unpin(name))
            world.pin(name, prompt, namespace)

    # ---- swapping ----

    @precondition(lambda self: self.world.has_host and self.settled())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        """Swap some sequences out, in any order."""
        swap_out(self.world, data.draw(st.lists(st.sampled_from(self.settled()), min_size=1, unique=True)))

    @precondition(lambda self: self.swapped())
    @rule(data=st.data(), more=st.lists(st.integers(0, 5), min_size=MAX_SEQUENCES), reserved=st.integers(0, 2))
    def swap_in(self, data: st.DataObject, more: list[int], reserved: int) -> None:
        """Bring some back; when memory said OK, they can grow as far as was asked."""
        world = self.world
        seq_ids = data.draw(st.lists(st.sampled_from(self.swapped()), min_size=1, unique=True))
        goals = [world.num_slots(seq_id) + count for seq_id, count in zip(seq_ids, more, strict=False)]
        if swap_in(world, seq_ids, goals, reserved) is Verdict.OK:
            for seq_id, goal in zip(seq_ids, goals, strict=True):
                missing = goal - world.num_slots(seq_id)
                assert not missing or world.grow(seq_id, missing), "can_swap_in promised too much"

    @precondition(lambda self: self.swapped())
    @rule(data=st.data())
    def free_on_the_host(self, data: st.DataObject) -> None:
        """End a sequence that is swapped out."""
        self.world.free(data.draw(st.sampled_from(self.swapped())))

    @rule()
    def reset(self) -> None:
        """Forget what is published, at any time."""
        self.world.reset()

    # ---- mistakes ----

    @precondition(is_alive)
    @rule(data=st.data(), excess=st.integers(1, 3))
    def misuse(self, data: st.DataObject, excess: int) -> None:
        """Every wrong command is refused and changes nothing (M7)."""
        world, manager = self.world, self.world.manager
        seq_id = self.pick(data)
        computed = world.num_computed(seq_id)
        most = min(world.num_slots(seq_id), len(world.tokens[seq_id]))
        world.refuses(ValueError, lambda: manager.publish(seq_id, most + excess))
        world.refuses(ValueError, lambda: manager.publish(seq_id, computed - excess))
        world.refuses(ValueError, lambda: manager.truncate(seq_id, world.num_slots(seq_id) + excess))
        world.refuses(ValueError, lambda: manager.truncate(seq_id, manager.rollback.limit(seq_id) - excess))
        world.refuses(ValueError, lambda: manager.append_slots((seq_id,), 1 - excess))
        if world.is_lookahead(seq_id):
            world.refuses(ValueError, lambda: manager.publish(seq_id, computed))
            if computed + 1 < world.num_slots(seq_id):
                world.refuses(ValueError, lambda: manager.truncate(seq_id, computed + 1))
        world.refuses(ValueError, lambda: manager.fork(seq_id, seq_id, []))
        world.refuses(KeyError, lambda: manager.free(-1))
        world.refuses(KeyError, lambda: manager.fork(-1, -2, []))
        world.refuses(KeyError, lambda: manager.append_slots((-1,), 1))
        hit = manager.match_prefix(world.chains[seq_id], 0)
        world.refuses(ValueError, lambda: manager.allocate(seq_id, world.chains[seq_id], hit))

    @precondition(is_alive)
    @rule(data=st.data())
    def free_makes_hits_stale(self, data: st.DataObject) -> None:
        """A hit that was found before another command is not taken."""
        world, manager = self.world, self.world.manager
        seq_id = self.pick(data)
        new_chain = manager.chain([0, 1, 0], NAMESPACES[0])
        hit = manager.match_prefix(new_chain)
        world.free(seq_id)
        world.refuses(ValueError, lambda: manager.allocate(-1, new_chain, hit))

    @precondition(lambda self: self.swapped())
    @rule(data=st.data())
    def misuse_of_the_swapped(self, data: st.DataObject) -> None:
        """Whoever is swapped out can come back or end, nothing else (M7)."""
        world, manager = self.world, self.world.manager
        seq_id = data.draw(st.sampled_from(self.swapped()))
        world.refuses(ValueError, lambda: manager.append_slots((seq_id,), 1))
        world.refuses(ValueError, lambda: manager.append_slots([*self.residents(), seq_id], atomic=True))
        world.refuses(ValueError, lambda: manager.publish(seq_id, world.num_computed(seq_id)))
        world.refuses(ValueError, lambda: manager.truncate(seq_id, world.num_computed(seq_id)))
        world.refuses(ValueError, lambda: manager.fork(seq_id, -1, []))
        world.refuses(ValueError, lambda: manager.swap_out([seq_id]))
        world.refuses(ValueError, lambda: manager.swap_in([seq_id, seq_id]))
        world.refuses(KeyError, lambda: manager.swap_in([-1]))

    # ---- the end ----

    @invariant()
    def tables_hold_what_was_granted(self) -> None:
        """Slots never outnumber what the tables can hold."""
        if hasattr(self, "world"):
            for seq_id in self.residents():
                room = len(self.world.manager.block_table(seq_id)) * self.world.size.block_size
                assert 0 <= room - self.world.num_slots(seq_id) < self.world.size.block_size

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for seq_id in sorted(self.world.tokens):
                self.world.free(seq_id)
            for name in self.world.manager.pins.names():
                self.world.unpin(name)
            usage = self.world.manager.usage()
            assert (usage.used, usage.num_sequences, usage.num_tokens) == (0, 0, 0), "M11"


class CollidingMachine(MemoryMachine):
    """The same, with digests so short that different blocks keep having the same one."""

    has_twin = False


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_few_short_histories() -> None:
    """A sample of the machine above, which takes long, for the default run."""
    run_state_machine_as_test(MemoryMachine, settings=settings(max_examples=8, stateful_step_count=20, deadline=None))


@pytest.mark.parametrize(
    "num_digests", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
def test_a_collision_is_a_miss_and_never_a_wrong_block(monkeypatch: pytest.MonkeyPatch, num_digests: int) -> None:
    honest = token_chain.block_digests

    def colliding(parent: bytes, contents: Iterable[bytes]) -> list[bytes]:
        digests = []
        for content in contents:
            parent = bytes([honest(parent, (content,))[0][0] % num_digests])
            digests.append(parent)
        return digests

    monkeypatch.setattr(token_chain, "block_digests", colliding)
    run_state_machine_as_test(
        CollidingMachine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )
