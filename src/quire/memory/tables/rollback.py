"""Rollback of a live sequence, and its limits."""

from __future__ import annotations

from quire.memory.tables.publish import next_publish_at
from quire.memory.tables.tables import BlockTables


class Rollback:
    """Removes slots from the end of a sequence."""

    __slots__ = ("_tables", "windowed_groups")

    def __init__(self, tables: BlockTables, windowed_groups: tuple[int, ...]) -> None:
        self._tables = tables
        self.windowed_groups = windowed_groups

    def limit(self, seq_id: int) -> int:
        """Return the minimum length to which a live sequence can be truncated: a shorter one would need freed blocks.

        With recurrent groups it is the length before the lookahead slots, or without these the present length.
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
        """Return the maximum length, at most `num_tokens`, to which a live sequence can be truncated."""
        is_all = num_tokens == self._tables.sequences[seq_id].num_slots
        return num_tokens if is_all or not self._tables.recurrent_groups else self.limit(seq_id)

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Remove the slots from `num_tokens` on; the owner shortens the chain's tokens afterwards."""
        tables = self._tables
        state = tables.resident(seq_id)
        least = self.limit(seq_id)
        if not least <= num_tokens <= state.num_slots or (
            tables.recurrent_groups and num_tokens not in (least, state.num_slots)
        ):
            allowed = f"{least} or {state.num_slots}" if tables.recurrent_groups else f"in [{least}, {state.num_slots}]"
            raise ValueError(f"num_tokens must be {allowed}, got {num_tokens}")
        tables.version += 1
        tables.shrink(state, num_tokens)
        state.num_computed = min(state.num_computed, num_tokens)
        state.num_published = min(state.num_published, num_tokens // tables.groups[0].spec.block_size)
        state.next_publish_at = next_publish_at(tables.groups, self.windowed_groups, state)
        state.chain.truncate(num_tokens)
        if tables.observer is not None:
            tables.observer.truncated(seq_id, num_tokens)
