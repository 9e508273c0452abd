"""Sequences that are advanced together or not at all: a slot more for each, or for none.

```
 tail    [ a b c . ]  held by three of them: two get a copy, the last writes it in place
 tail    [ a b c d ]  full: whoever holds it needs a block of its own
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import add

from quire.errors import InvariantViolation
from quire.memory.sequence_memory import SequenceMemory
from quire.memory.tables import BlockTables


def count_growth(tables: BlockTables, states: Sequence[SequenceMemory]) -> list[int]:
    """Return the blocks of each group that a slot more for each of some sequences takes, at least.

    Args:
        tables: of all sequences.
        states: of different sequences on the device that look ahead to nothing.
    """
    needs = []
    for idx, group in enumerate(tables.groups):
        size, num_blocks = group.spec.block_size, 0
        growers: Counter[int] = Counter()
        for state in states:
            table = state.tables[idx]
            is_begun = bool(table) if group.spec.carries else state.num_slots % size > 0
            if not is_begun:
                num_blocks += 1
            elif group.spec.carries or not state.has_exclusive_tail:
                growers[table[-1]] += 1
        holders = group.pool.ref_counts
        # Who writes to a block that is shared gets a copy, but for its last holder.
        needs.append(num_blocks + sum(count - (count == holders[tail]) for tail, count in growers.items()))
    return needs


def grow_together(tables: BlockTables, states: Sequence[SequenceMemory]) -> bool:
    """Give each of some sequences a slot more, or change nothing.

    Args:
        tables: of all sequences.
        states: see `count_growth`.

    Returns:
        False when some group lacks the blocks.
    """
    size = tables.groups[0].spec.block_size
    if all(state.has_exclusive_tail and state.num_slots % size for state in states) and not tables.carried:
        for state in states:
            state.num_slots += 1
        return True
    needs = count_growth(tables, states)
    if any(needs) and not tables.arena.can_hold(needs):
        return False
    # What is published may be copied instead of written in place only where nobody lacks the room for it.
    has_plenty = tables.arena.can_hold(list(map(add, needs, [len(states)] * len(needs))))
    for state in states:
        if not tables.grow(state, state.num_slots + 1, may_spare=has_plenty):
            raise InvariantViolation("M7", f"sequences that need {needs} blocks together were refused one of them")
    return True
