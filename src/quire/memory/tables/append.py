"""Appending of slots: to one sequence after the other, or to all of a lockstep group.

Most sequences of a step decode, and for most of these a token only increments `num_slots`, which costs less than a
call, so a loop does it inline. Sequences whose last blocks are full get their next blocks together. All other cases are
handled one sequence at a time.

The beams of a search all get a slot, or none does:

```
 tail    [ a b c . ]  held by three beams: two copy it on write, the last writes it in place
 tail    [ a b c d ]  full: each holder needs a new block
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from operator import add

from quire.errors import InvariantViolation
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.tables import BlockTables


def append_slots(tables: BlockTables, seq_ids: Sequence[int], num_tokens: int, lookahead: int, *, atomic: bool) -> int:
    """Give sequences slots, and return the number of sequences that got them; see `KVCacheManager.append_slots`."""
    if atomic and (num_tokens, lookahead) != (1, 0):
        raise ValueError(f"an atomic append needs num_tokens 1 and lookahead 0, got {num_tokens} and {lookahead}")
    if atomic:
        return len(seq_ids) if append_one_to_all(tables, seq_ids) else 0
    if (num_tokens, lookahead) == (1, 0):
        return append_one_to_each(tables, seq_ids)
    if len(seq_ids) > 1 and num_tokens > 1 and not lookahead and append_more_to_each(tables, seq_ids, num_tokens):
        return len(seq_ids)
    grants = (append_to_one(tables, seq_id, num_tokens, lookahead) for seq_id in seq_ids)
    return sum(takewhile(bool, grants))


def append_to_one(tables: BlockTables, seq_id: int, num_tokens: int, lookahead: int) -> bool:
    """Give a sequence slots, or change nothing; see `KVCacheManager.append_slots`."""
    if num_tokens < 1 or lookahead < 0:
        raise ValueError(f"num_tokens must be at least 1 and lookahead at least 0, got {num_tokens} and {lookahead}")
    state = tables.sequences[seq_id]
    end = state.num_slots + num_tokens + lookahead
    size = tables.groups[0].spec.block_size
    offset = state.num_slots % size
    holds_states = lookahead > 0 and bool(tables.recurrent_groups)
    if offset and state.tail_is_private and end - state.num_slots <= size - offset and not holds_states:
        state.num_slots = end
        return True
    return tables.grow(tables.resident(seq_id), end, is_lookahead=lookahead > 0)


def append_one_to_each(tables: BlockTables, seq_ids: Sequence[int]) -> int:
    """Give sequences, one after the other, a slot for one more token, up to the first without room.

    The effects and errors equal those from `append_to_one` for each in turn.
    """
    sequences = tables.sequences
    size = tables.groups[0].spec.block_size
    num_available = _num_plain_blocks(tables)
    crossing: list[SequenceBlocks] = []
    for position, seq_id in enumerate(seq_ids):
        state = sequences[seq_id]
        if state.num_slots % size:
            if state.tail_is_private:
                state.num_slots += 1
                continue
        elif len(crossing) < num_available and state.host_tables is None:
            crossing.append(state)
            continue
        # This sequence may need blocks too, or fail: the sequences before it get their blocks first.
        _add_block_to_each(tables, crossing)
        crossing.clear()
        if not append_to_one(tables, seq_id, 1, 0):
            return position
        num_available = _num_plain_blocks(tables)
    _add_block_to_each(tables, crossing)
    return len(seq_ids)


def append_more_to_each(tables: BlockTables, seq_ids: Sequence[int], num_tokens: int) -> bool:
    """Give sequences slots for several tokens each, with all their blocks taken together.

    The effect equals `append_to_one` for each in turn. False, with nothing changed, if the sequences need more than
    new blocks of one group, or the pool lacks blocks.
    """
    if len(tables.groups) > 1 or tables.recurrent_groups:
        return False
    size = tables.groups[0].spec.block_size
    states, needs = [tables.sequences[seq_id] for seq_id in seq_ids], []
    for state in states:
        if state.host_tables is not None or (state.num_slots % size and not state.tail_is_private):
            return False
        needs.append((state.num_slots + num_tokens + size - 1) // size - len(state.tables[0]))
    num_blocks = sum(needs)
    if num_blocks > _num_plain_blocks(tables):
        return False
    block_ids = tables.take(0, num_blocks) if num_blocks else []
    start = 0
    for state, need in zip(states, needs, strict=True):
        state.num_slots += num_tokens
        if need:
            table = state.tables[0]
            state.mark_dirty(0, len(table))
            table += block_ids[start : start + need]
            start += need
            tables.version += 1
    return True


def _num_plain_blocks(tables: BlockTables) -> int:
    """Return the number of free and idle blocks; 0 with several groups or recurrent groups, which need `grow`."""
    if tables.recurrent_groups or len(tables.groups) > 1:
        return 0
    pool = tables.groups[0].pool
    return len(pool.ref_counts) - 1 - pool.num_used


def _add_block_to_each(tables: BlockTables, states: Sequence[SequenceBlocks]) -> None:
    """Give sequences whose last blocks are full a slot in a new block each; the pool has enough blocks."""
    if not states:
        return
    tables.version += 1
    block_ids = tables.groups[0].pool.take(len(states))
    if tables.arena.moves:  # evicted blocks are copied to the host tier
        tables.apply_moves()
    for state, block_id in zip(states, block_ids, strict=True):
        table = state.tables[0]
        state.dirty_from[0] = min(state.dirty_from[0], len(table))
        state.is_dirty = True
        table.append(block_id)
        state.num_slots += 1


def append_one_to_all(tables: BlockTables, seq_ids: Sequence[int]) -> bool:
    """Give each of some sequences a slot for one more token, or change nothing."""
    states = [tables.resident(seq_id) for seq_id in seq_ids]
    size = tables.groups[0].spec.block_size
    if all(state.tail_is_private and state.num_slots % size for state in states) and not tables.recurrent_groups:
        for state in states:
            state.num_slots += 1
        return True
    needs = count_growth(tables, states)
    if any(needs) and not tables.arena.fits(needs):
        return False
    # Published blocks are copied instead of written in place only if there is room for that in all sequences.
    has_plenty = tables.arena.fits(list(map(add, needs, [len(states)] * len(needs))))
    for state in states:
        if not tables.grow(state, state.num_slots + 1, may_copy_published=has_plenty):
            raise InvariantViolation("M7", f"no room for the {needs} blocks of a lockstep group, although they fit")
    return True


def count_growth(tables: BlockTables, states: Sequence[SequenceBlocks]) -> list[int]:
    """Return the minimum number of blocks of each group that one more slot for each of some sequences takes."""
    needs = []
    for idx, group in enumerate(tables.groups):
        size, num_blocks = group.spec.block_size, 0
        growers: Counter[int] = Counter()
        for state in states:
            table = state.tables[idx]
            is_begun = bool(table) if group.spec.is_recurrent else state.num_slots % size > 0
            if not is_begun:
                num_blocks += 1
            elif group.spec.is_recurrent or not state.tail_is_private:
                growers[table[-1]] += 1
        holders = group.pool.ref_counts
        # A write to a shared block copies it, except for the last holder.
        needs.append(num_blocks + sum(count - (count == holders[tail]) for tail, count in growers.items()))
    return needs
