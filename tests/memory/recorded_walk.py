"""Random commands of every verb to a memory manager without a world around it, for recordings."""

from __future__ import annotations

import random

from quire.memory import KVCacheManager, MediaSpan, Namespace, Verdict
from quire.memory.results import FetchedBlock
from quire.memory.sequence_blocks import SequenceBlocks

SIZE = 4


def load(memory: KVCacheManager, tokens: list[int]) -> None:
    """Bring up what of a prompt is on disk: most blocks are."""
    assert memory.archive is not None
    chain = memory.chain(tokens, Namespace())
    num_blocks, loads = memory.archive.find_loads(chain, lambda block: block.digest[0] % 8 > 0)
    fetched = [FetchedBlock(each.block.group_idx, each.block_idx, ticket) for ticket, each in enumerate(loads, 7)]
    if fetched:
        memory.archive.publish_loaded(chain, num_blocks, fetched)


def walk(memory: KVCacheManager, rng: random.Random, num_commands: int) -> None:
    """Issue random commands of every verb, as a careful owner may."""
    manager, next_id = memory, 0
    swaps = ("out", "in", "in") * (manager.host is not None) + ("load", "load") * (manager.archive is not None)
    for number in range(num_commands):
        if number % 400 == 399:
            memory.reset_prefix_cache()
        live = sorted(manager.sequences)
        verb = rng.choice(
            ("enter", "enter", *["grow"] * 4, "advance", "fork", "truncate", "free", "pin", "tell", *swaps)
        )
        if verb == "enter" and len(live) < 5:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 5 * SIZE))]
            media = [MediaSpan(rng.randrange(9), rng.randrange(1, 9), rng.choice((b"fox", b"kite")))]
            salt, media = rng.choice((None, "tenant")), media * (rng.random() < 0.4)
            chain = memory.chain(tokens, Namespace(cache_salt=salt), media)
            hit = memory.match_prefix(chain, rng.choice((None, None, 2 * SIZE)))
            if not hit.loads or memory.capacity.can_allocate(len(tokens), hit).verdict is Verdict.OK:
                memory.allocate(next_id, chain, hit)
                next_id += 1
        elif verb == "load":
            load(memory, [rng.randrange(2) for _ in range(rng.randrange(SIZE, 5 * SIZE))])
        elif verb == "pin":
            name = rng.choice("ab")
            if name in manager.pins:
                memory.unpin(name)
            elif live:
                memory.pin(name, manager.sequences[rng.choice(live)].chain)
        elif verb == "tell":
            memory.take_ops()
        elif verb == "advance":
            advance(memory, [key for key in live if is_settled(manager.sequences[key])])
        elif verb in swaps:
            settled = [(key, state) for key, state in sorted(manager.sequences.items()) if is_settled(state)]
            siblings = [key for key, state in settled if state.is_swapped == (verb == "in") and rng.random() < 0.7]
            if verb == "out" and memory.capacity.can_swap_out(siblings).verdict is Verdict.OK:
                memory.swap_out(siblings)
            elif verb == "in" and memory.capacity.can_swap_in(siblings, [0] * len(siblings)).verdict is Verdict.OK:
                memory.swap_in(siblings)
        elif live:
            seq_id = rng.choice(live)
            state = manager.sequences[seq_id]
            if state.is_swapped and verb != "free":
                continue
            tokens = state.chain.tokens
            if verb == "grow":
                grow(memory, rng, seq_id)
            elif verb == "fork" and state.num_slots == state.num_computed:
                memory.fork(seq_id, next_id, tokens[: state.num_computed])
                next_id += 1
            elif verb == "truncate":
                length = rng.randrange(memory.rollback.limit(seq_id), state.num_slots + 1)
                if manager.tables.recurrent_groups and length < state.num_slots:
                    length = memory.rollback.limit(seq_id)
                memory.truncate(seq_id, length)
                del tokens[length:]
            elif verb == "free":
                memory.free(seq_id, retain=rng.random() < 0.5, is_sound=rng.random() < 0.9)


def grow(memory: KVCacheManager, rng: random.Random, seq_id: int) -> None:
    """Give a sequence slots, some to look ahead, and compute some of them."""
    state = memory.sequences[seq_id]
    tokens, lookahead = state.chain.tokens, rng.randrange(3)
    tokens += [rng.randrange(2) for _ in range(max(0, state.num_slots + 1 - len(tokens)))]
    if not memory.append_slots((seq_id,), rng.randrange(1, len(tokens) - state.num_slots + 1), lookahead):
        return
    if state.checkpoint is None:
        most = min(len(tokens), state.num_slots)
        memory.publish(seq_id, rng.randrange(state.num_computed, most + 1))
    elif rng.random() < 0.5:
        tokens += [0] * (state.num_slots - len(tokens))
        memory.publish(seq_id, state.num_slots)
    memory.take_table_deltas((seq_id,))[0]


def advance(memory: KVCacheManager, seq_ids: list[int]) -> None:
    """Give all sequences that are not swapped out a slot more, or none of them, and compute it."""
    states = {seq_id: memory.sequences[seq_id] for seq_id in seq_ids}
    group = {seq_id: state for seq_id, state in states.items() if not state.is_swapped}
    if group and memory.append_slots([*group], atomic=True):
        for seq_id, state in group.items():
            state.chain.tokens += [seq_id % 2] * max(0, state.num_slots - len(state.chain.tokens))
            memory.publish(seq_id, state.num_slots)


def is_settled(state: SequenceBlocks) -> bool:
    return state.num_slots == state.num_computed
