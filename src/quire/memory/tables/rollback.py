"""The rollback of a live sequence: how far it can go, and how it is done."""

from __future__ import annotations

from quire.memory.tables.publish import next_publish_at
from quire.memory.tables.tables import BlockTables


class Rollback:
    """Takes back slots at the end of a sequence.

    Args:
        tables: of all sequences.
        mortal: the groups whose blocks die while the sequence lives.
    """

    __slots__ = ("_tables", "windowed_groups")

    def __init__(self, tables: BlockTables, windowed_groups: tuple[int, ...]) -> None:
        self._tables = tables
        self.windowed_groups = windowed_groups

    def limit(self, seq_id: int) -> int:
        """Return the least length to which a live sequence can be truncated: before it, live tokens would be gone.

        With groups of states it is the only one: where it looked ahead from, else the length that it has.
        """
        state = self._tables.sequences[seq_id]
        if self._tables.recurrent_groups:
            return state.num_slots if state.checkpoint is None else state.checkpoint.num_tokens
        num_skipped, groups = state.num_skipped, self._tables.groups
        deaths = (
            groups[idx].spec.freed_after(num_skipped[idx] - 1) for idx in self.windowed_groups if num_skipped[idx]
        )
        return max(deaths, default=0)

    def point(self, seq_id: int, num_tokens: int) -> int:
        """Return the greatest length, `num_tokens` at most, to which a live sequence can be truncated.

        Args:
            seq_id: a live sequence.
            num_tokens: from `limit` to the slots that it has.
        """
        is_all = num_tokens == self._tables.sequences[seq_id].num_slots
        return num_tokens if is_all or not self._tables.recurrent_groups else self.limit(seq_id)

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Take back the slots from `num_tokens` on; the owner shortens the chain's tokens afterwards.

        Args:
            seq_id: a live sequence.
            num_tokens: slots to keep, at most those it has, and at least `limit`: dead blocks are gone. With
                groups of states it is the limit or all: what lies between was computed, but no state was kept there.

        Raises:
            ValueError: more slots than there are, fewer than the dead blocks allow, or a length without a state; or the
                sequence is swapped out.
        """
        tables = self._tables
        state = tables.resident(seq_id)
        least = self.limit(seq_id)
        if not least <= num_tokens <= state.num_slots or (
            tables.recurrent_groups and num_tokens not in (least, state.num_slots)
        ):
            to = f"{least} or {state.num_slots}" if tables.recurrent_groups else f"[{least}, {state.num_slots}]"
            raise ValueError(f"cannot truncate to {num_tokens} tokens, only to {to}")
        tables.version += 1
        tables.shrink(state, num_tokens)
        state.num_computed = min(state.num_computed, num_tokens)
        state.num_published = min(state.num_published, num_tokens // tables.groups[0].spec.block_size)
        state.next_publish_at = next_publish_at(tables.groups, self.windowed_groups, state)
        state.chain.truncate(num_tokens)
        if tables.observer is not None:
            tables.observer.truncated(seq_id, num_tokens)
