"""Random commands for a small world."""

from __future__ import annotations

import random

from quire.memory import Verdict
from tests.memory.host_world import swap_in, swap_out
from tests.memory.media import random_media
from tests.memory.world import NAMESPACES, World

VERBS = ("enter", "enter", "decode", "decode", "decode", "look ahead", "fork", "truncate", "free")
SWAPS = ("swap",) * 5


def random_swap(world: World, rng: random.Random) -> None:
    """Swap some sequences out, or some back and on."""
    swapped = [seq_id for seq_id in sorted(world.tokens) if world.is_swapped(seq_id)]
    settled = [
        seq_id
        for seq_id in sorted(world.tokens)
        if seq_id not in swapped and world.num_slots(seq_id) == world.num_computed(seq_id)
    ]
    ready = [seq_id for seq_id in swapped if len(world.tokens[seq_id]) == world.num_slots(seq_id)]
    if settled and rng.random() < 0.5:
        swap_out(world, rng.sample(settled, rng.randrange(1, len(settled) + 1)))
    elif ready and rng.random() < 0.7:
        seq_ids = rng.sample(ready, rng.randrange(1, len(ready) + 1))
        goals = [world.num_slots(seq_id) + rng.randrange(3) for seq_id in seq_ids]
        if swap_in(world, seq_ids, goals) is Verdict.OK:
            for seq_id, goal in zip(seq_ids, goals, strict=True):
                count = goal - world.num_slots(seq_id)
                world.tokens[seq_id].extend(rng.randrange(2) for _ in range(count))
                if count:
                    assert world.grow(seq_id, count), "can_swap_in promised what append_slots refuses"
                    world.store(seq_id, count)
    elif swapped:
        swap_in(world, swapped, [0] * len(swapped))


def random_walk(world: World, rng: random.Random, num_commands: int, *, max_sequences: int = 4) -> None:
    """Issue random commands; each is one that a careful owner may issue."""
    next_id = 0
    for _ in range(num_commands):
        live = sorted(world.tokens)
        verb = rng.choice(VERBS + SWAPS * world.has_host)
        if rng.random() < 0.02:
            world.reset()
        if world.size.pins and rng.random() < 0.1:
            pin_or_unpin(world, rng)
        if world.disk is not None and rng.random() < 0.2:
            prompt = random_prompt(world, rng, 4)
            world.disk.load(prompt, rng.choice(NAMESPACES), rng.choice([None, None, rng.randrange(9)]))
        if verb == "enter" and len(live) < max_sequences:
            prompt = random_prompt(world, rng, 3)
            next_id += 1
            world.enter(next_id, prompt, rng.choice(NAMESPACES))
            continue
        if not live:
            continue
        if verb == "swap":
            random_swap(world, rng)
            continue
        seq_id = rng.choice(live)
        if world.is_swapped(seq_id) and verb != "free":
            continue
        settled = world.num_slots(seq_id) == world.num_computed(seq_id) == len(world.tokens[seq_id])
        if verb == "decode" and settled:
            if world.grow(seq_id, 1):
                world.tokens[seq_id].append(rng.randrange(2))
                world.store(seq_id, 1)
        elif verb == "look ahead" and settled and any(kind.is_state for kind in world.size.kinds):
            num_drafts = rng.randrange(1, 4)
            if world.grow(seq_id, 1, num_drafts):
                world.tokens[seq_id].extend(rng.randrange(2) for _ in range(1 + num_drafts))
                if rng.random() < 0.5:
                    world.store(seq_id, 1 + num_drafts)
                else:
                    world.truncate(seq_id, world.manager.rollback.limit(seq_id))
        elif verb == "look ahead" and settled:
            num_drafts = rng.randrange(1, 4)
            if world.grow(seq_id, num_drafts):
                world.tokens[seq_id].extend(rng.randrange(2) for _ in range(num_drafts))
                num_accepted = rng.randrange(num_drafts + 1)
                world.store(seq_id, num_accepted)
                world.truncate(seq_id, world.num_computed(seq_id))
        elif verb == "fork" and settled and len(live) < max_sequences:
            next_id += 1
            world.fork(seq_id, next_id, [])
        elif verb == "truncate":
            world.truncate(seq_id, rng.choice((*world.ways_back(seq_id), world.num_slots(seq_id))))
        elif verb == "free":
            world.free(seq_id, retain=world.size.retention > 0 and rng.random() < 0.5)
    for seq_id in sorted(world.tokens):
        world.free(seq_id)
    num_pinned = sum(len(world.manager.pins.counts(idx)) for idx in range(len(world.size.kinds)))
    assert world.manager.usage().used == num_pinned, "M11: nobody lives, but blocks are used"


def random_prompt(world: World, rng: random.Random, num_blocks: int) -> list[int]:
    """Return a prompt of at most `num_blocks` blocks and a token, with media where the world has them."""
    prompt = [rng.randrange(2) for _ in range(rng.randrange(1, num_blocks * world.size.block_size + 2))]
    return random_media(rng, prompt) if world.size.media else prompt


def pin_or_unpin(world: World, rng: random.Random) -> None:
    """Pin the beginning of a live sequence, or let go of a pin."""
    names = sorted(world.manager.pins.names())
    if names and rng.random() < 0.5:
        world.unpin(rng.choice(names))
    elif world.tokens:
        seq_id = rng.choice(sorted(world.tokens))
        name = next(str(i) for i in range(len(names) + 1) if str(i) not in names)
        world.pin(name, list(world.tokens[seq_id]), world.namespaces[seq_id])
