"""A complete search of small worlds: every state that commands can reach, every command in every state."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from itertools import permutations, product
from typing import NamedTuple

from quire.memory import Verdict
from tests.memory.host_world import swap_in, swap_out
from tests.memory.media import all_prompts, renamed, spans_of, with_media
from tests.memory.twin_pages import Page
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize

SEQUENCES = (1, 2)
VOCABULARY = (0, 1)

Command = tuple[str, int, tuple[int, ...]]


class Searched(NamedTuple):
    """How much a search has seen."""

    num_states: int
    num_transitions: int


def search(
    size: WorldSize, *, max_prompt: int, max_slots: int, has_resets: bool = False, num_sequences: int = 2
) -> Searched:
    """Visit every state of a world breadth first, and check everything after every command.

    Args:
        size: of the world.
        max_prompt: tokens of a prompt at most.
        max_slots: slots of a sequence at most.
        has_resets: the prefix cache may be reset in any state.
        num_sequences: at once.
    """
    start = World(size)
    seen = {canonical(start)}
    frontier = deque([pickle.dumps(start)])
    num_transitions = 0
    while frontier:
        state = frontier.popleft()
        world: World = pickle.loads(state)
        resets: list[Command] = [("reset", 0, ())] if has_resets else []
        for command in [*commands(world, max_prompt, max_slots, num_sequences), *loads(world, max_prompt), *resets]:
            perform(world, command)
            num_transitions += 1
            key = canonical(world)
            if key not in seen:
                seen.add(key)
                frontier.append(pickle.dumps(world))
            world = pickle.loads(state)
    return Searched(len(seen), num_transitions)


def commands(world: World, max_prompt: int, max_slots: int, num_sequences: int) -> Iterator[Command]:
    """Yield every command that makes sense; which of two absent sequences is opened makes no difference."""
    absent = [seq_id for seq_id in SEQUENCES[:num_sequences] if seq_id not in world.tokens]
    for seq_id in absent[:1]:
        for length in range(1, max_prompt + 1):
            for prompt in product(VOCABULARY, repeat=length):
                yield "open", seq_id, prompt
            for words in all_prompts(VOCABULARY, length) if world.size.media else ():
                yield "open", seq_id, tuple(words)
    if world.twin.pins:
        yield "unpin", 0, ()
    elif world.size.pins:
        for page in (page for group in world.twin.groups for page in group.published.values()):
            assert page.prefix is not None
            yield "pin", 0, page.prefix[1]
    if world.has_host:
        yield from swaps(world)
    for seq_id, tokens in world.tokens.items():
        num_slots, num_computed = world.num_slots(seq_id), world.num_computed(seq_id)
        yield "free", seq_id, ()
        if world.size.retention:
            yield "free last", seq_id, ()
        if world.is_swapped(seq_id):
            continue
        if num_slots < max_slots:
            yield "grow", seq_id, ()
        if num_slots < max_slots - 1 and any(kind.is_state for kind in world.size.kinds):
            yield "look ahead", seq_id, ()
        for length in world.ways_back(seq_id):
            yield "truncate", seq_id, (length,)
        if num_computed < num_slots:
            count = num_slots - num_computed if world.is_lookahead(seq_id) else 1
            known = tokens[num_computed : num_computed + count]
            for unknown in product(VOCABULARY, repeat=count - len(known)):
                yield "store", seq_id, (*known, *unknown)
        elif absent:
            yield "fork", seq_id, (absent[0],)


def swaps(world: World) -> Iterator[Command]:
    """Yield the swaps of each sequence, and of both together in either order."""
    for order in (*((seq_id,) for seq_id in world.tokens), *permutations(world.tokens, 2)):
        if all(world.is_swapped(seq_id) for seq_id in order):
            yield "swap in", 0, order
        elif not any(world.is_swapped(seq_id) for seq_id in order) and all(
            world.num_slots(seq_id) == world.num_computed(seq_id) for seq_id in order
        ):
            yield "swap out", 0, order


def loads(world: World, max_prompt: int) -> Iterator[Command]:
    """Yield every load that makes sense; a hit leaves one token to compute."""
    if world.disk is not None:
        for prompt in product(VOCABULARY, repeat=max_prompt):
            yield "load", 0, (*prompt, 0)


def perform(world: World, command: Command) -> None:
    """Perform a command and have the worker catch up, so that equal states look equal."""
    verb, seq_id, args = command
    if verb == "open":
        status = world.open(seq_id, with_media(args, spans_of(args)))
        # What memory promises, it keeps: the promise is redeemed in a copy of this very state.
        if status.verdict is Verdict.OK:
            copy: World = pickle.loads(pickle.dumps(world))
            assert copy.grow(seq_id, len(args) - copy.num_slots(seq_id)), "can_allocate promised too much"
    elif verb == "free":
        world.free(seq_id)
    elif verb == "free last":
        world.free(seq_id, retain=True)
    elif verb == "pin":
        world.pin("pin", list(args))
    elif verb == "unpin":
        world.unpin("pin")
    elif verb == "reset":
        world.reset()
    elif verb == "load":
        assert world.disk is not None
        world.disk.load(list(args), NAMESPACES[0])
    elif verb == "swap out":
        swap_out(world, list(args))
    elif verb == "swap in":
        redeem_swap_in(world, list(args))
        swap_in(world, list(args), [0] * len(args))
    elif verb == "grow":
        is_granted = world.grow(seq_id, 1)
        # One more slot needs a block of each group at most; alone, a sequence may have every block.
        is_alone = len(world.tokens) == 1
        fits = world.twin.num_available() >= len(world.size.kinds) or world.num_slots(seq_id) % world.size.block_size
        assert is_granted or not (is_alone and fits), "a sequence that is alone is refused what is there"
    elif verb == "look ahead":
        world.grow(seq_id, 1, 1)
    elif verb == "truncate":
        world.truncate(seq_id, args[0])
    elif verb == "store":
        tokens = world.tokens[seq_id]
        tokens += args[len(tokens) - world.num_computed(seq_id) :]
        world.store(seq_id, len(args))
    else:
        world.fork(seq_id, args[0], [])
    world.perform_copies()
    for live in world.tokens:
        world.sync(live)


def redeem_swap_in(world: World, seq_ids: list[int]) -> None:
    """Hold memory to its word that a family can come back and grow by a token each, in a copy of this very state."""
    copy: World = pickle.loads(pickle.dumps(world))
    if swap_in(copy, seq_ids, [world.num_slots(seq_id) + 1 for seq_id in seq_ids]) is Verdict.OK:
        assert all(copy.grow(seq_id, 1) for seq_id in seq_ids), "can_swap_in promised too much"


def canonical(world: World) -> tuple[object, ...]:
    """Return a state as a value that is the same for states that differ in names only.

    Blocks are named by where they are first met, free ones not at all; which sequence is which, which token and which
    medium, makes no difference. What each block is published under is read from the twin, which was found to agree.
    """
    flips = range(4) if world.size.media else (0, 1)
    return min(_named(world, order, flip) for order in permutations(world.twin.sequences) for flip in flips)


def _named(world: World, order: tuple[int, ...], flip: int) -> tuple[object, ...]:
    host = world.twin.host
    names: dict[Page, int] = {}
    sequences = []
    for seq_id in order:
        sequence = world.twin.sequences[seq_id]
        tokens = tuple(renamed(token_id, flip) for token_id in sequence.tokens)
        on_host = host is not None and seq_id in host.tables
        pages = tuple(
            tuple(names.setdefault(page, len(names)) if page else -1 for page in group)
            for group in (host.tables[seq_id] if host is not None and on_host else sequence.pages)
        )
        ahead = tuple(sorted(stop for stop in sequence.snapshot_points if stop > sequence.num_slots))
        held = () if sequence.checkpoint is None else (sequence.checkpoint[0], *sequence.checkpoint[1].values())
        checkpoint = tuple(names.setdefault(page, len(names)) if isinstance(page, Page) else page for page in held)
        counts = sequence.num_slots, sequence.num_computed, sequence.is_publishing
        # Where all is kept, none of these matters.
        has_dead = any(kind.name != "full" for kind in world.size.kinds)
        marks = (*sorted(sequence.branch_points), sequence.opened_on, sequence.regular) if has_dead else ()
        sequences.append((tokens, pages, on_host, counts, ahead, marks, checkpoint))
    pins = tuple(
        tuple(names.setdefault(page, len(names)) if page else -1 for page in group)
        for pages in world.twin.pins.values()
        for group in pages
    )
    # Which of all idle pages is evicted first matters, whatever group it is in.
    tiers = [world.twin.groups] if host is None else [world.twin.groups, host.groups]
    idle = tuple(
        tuple(
            (idx, names.setdefault(page, len(names)), page.goes_first)
            for _, idx, page in sorted((page.turn, idx, page) for idx, group in enumerate(tier) for page in group.idle)
        )
        for tier in tiers
    )
    hints = tuple(names.setdefault(page, len(names)) for _, page in world.twin.hints)
    published = tuple(
        () if page.prefix is None else tuple(renamed(token_id, flip) for token_id in page.prefix[1]) for page in names
    )
    stored = () if world.disk is None else world.disk.contents()
    on_disk = tuple(sorted((idx, tuple(renamed(token_id, flip) for token_id in tokens)) for idx, _, tokens in stored))
    return tuple(sequences), pins, idle, hints, published, _siblings(world, names), on_disk


def _siblings(world: World, names: dict[Page, int]) -> tuple[tuple[int, ...], ...]:
    """Return who was published after whom where both follow the same page: of equally good ones the youngest is hit."""
    size = world.size.block_size
    families: dict[tuple[int, ...], list[int]] = {}
    if size == 1:  # no block can be hit in part
        return ()
    for (_, tokens), page in world.twin.groups[0].published.items():
        families.setdefault(tokens[: (len(tokens) - 1) // size * size], []).append(names[page])
    return tuple(sorted(tuple(siblings) for siblings in families.values() if len(siblings) > 1))
