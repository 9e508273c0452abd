"""What the plan of a step of many sequences asks of memory: the verbs for one sequence, for all of them in one call.

Most sequences of a step decode, and a token changes one counter of most of those. A call costs more than that; here it
is a turn of a loop. Sequences whose last blocks are full get their next ones together; whatever else is more than
counting goes through the verb for one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.memory.gangs import grow_together
from quire.memory.ops import TableDelta
from quire.memory.sequence_memory import SequenceMemory
from quire.memory.tables import BlockTables


class SlotCommand(Protocol):
    """The verb for one sequence, as `KVCacheManager` describes it."""

    def append_slots(self, seq_id: int, num_tokens: int, lookahead: int = 0) -> bool: ...


class BatchCommands:
    """Commands for several sequences: but for `append_slot_to_all`, each has the effect, and the errors, of the command
    for one, in turn.

    Args:
        manager: has the verb for one sequence.
        tables: of its live sequences.
        block_size: tokens of a block.
    """

    __slots__ = ("_block_size", "_manager", "_sequences", "_tables")

    def __init__(self, manager: SlotCommand, tables: BlockTables, block_size: int) -> None:
        self._manager = manager
        self._tables = tables
        self._sequences = tables.sequences
        self._block_size = block_size

    def append_slot_to_each(self, seq_ids: Sequence[int]) -> int:
        """Give sequences, one after the other, a slot for one more token, up to the first that lacks the blocks.

        Args:
            seq_ids: live sequences on the device, all different.

        Returns:
            How many of them, from the first on, have it.
        """
        tables, block_size, append_slots = self._tables, self._block_size, self._manager.append_slots
        sequences, num_at_hand = self._sequences, tables.num_blocks_at_hand()
        crossing: list[SequenceMemory] = []
        for position, seq_id in enumerate(seq_ids):
            state = sequences[seq_id]
            if state.num_slots % block_size:
                if state.has_exclusive_tail:
                    state.num_slots += 1
                    continue
            elif len(crossing) < num_at_hand:
                crossing.append(state)
                continue
            # This one may take blocks too, or find that there are none: those before it have theirs first.
            tables.add_block_to_each(crossing)
            crossing.clear()
            if not append_slots(seq_id, 1):
                return position
            num_at_hand = tables.num_blocks_at_hand()
        tables.add_block_to_each(crossing)
        return len(seq_ids)

    def append_slot_to_all(self, seq_ids: Sequence[int]) -> bool:
        """Give sequences that advance together a slot for one more token each, or change nothing.

        Args:
            seq_ids: live sequences on the device, all different, none of which looks ahead.

        Returns:
            False when some group lacks the blocks.

        Raises:
            ValueError: one is swapped out.
        """
        return grow_together(self._tables, [self._tables.resident(seq_id) for seq_id in seq_ids])

    def take_table_deltas_of_each(self, seq_ids: Iterable[int]) -> list[tuple[TableDelta, ...]]:
        """Hand over, for each sequence, the table entries that changed since the last call for it."""
        states = map(self._sequences.__getitem__, seq_ids)
        return [state.take_deltas() if state.is_dirty else () for state in states]
