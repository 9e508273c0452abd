"""Random commands for a small world."""

from __future__ import annotations

import random

from tests.memory.world import NAMESPACES, World


def random_walk(world: World, rng: random.Random, num_commands: int, *, max_sequences: int = 4) -> None:
    """Issue random commands; each is one that a careful owner may issue."""
    next_id = 0
    for _ in range(num_commands):
        live = sorted(world.tokens)
        verb = rng.choice(("enter", "enter", "decode", "decode", "decode", "look ahead", "fork", "truncate", "free"))
        if rng.random() < 0.02:
            world.reset()
        if verb == "enter" and len(live) < max_sequences:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 3 * world.size.block_size + 2))]
            next_id += 1
            world.enter(next_id, prompt, rng.choice(NAMESPACES))
            continue
        if not live:
            continue
        seq_id = rng.choice(live)
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
                    world.truncate(seq_id, world.manager.rollback_limit(seq_id))
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
            world.free(seq_id)
    for seq_id in sorted(world.tokens):
        world.free(seq_id)
    num_pinned = sum(len(world.manager.pins.counts(idx)) for idx in range(len(world.size.kinds)))
    assert world.manager.usage().used == num_pinned, "M11: nobody lives, but blocks are used"
