"""The rollback of a live sequence: how far it can go, and how it is done."""

from __future__ import annotations

from quire.memory.tables.publish import next_event
from quire.memory.tables.tables import BlockTables


class Rollback:
    """Takes back slots at the end of a sequence.

    Args:
        tables: of all sequences.
        mortal: the groups whose blocks die while the sequence lives.
    """

    __slots__ = ("_mortal", "_tables")

    def __init__(self, tables: BlockTables, mortal: tuple[int, ...]) -> None:
        self._tables = tables
        self._mortal = mortal

    def limit(self, seq_id: int) -> int:
        """Return the least length to which a live sequence can be truncated: before it, live tokens would be gone.

        With groups of states it is the only one: where it looked ahead from, else the length that it has.
        """
        state = self._tables.sequences[seq_id]
        if self._tables.carried:
            return state.num_slots if state.checkpoint is None else state.checkpoint.num_tokens
        num_dead, groups = state.num_dead, self._tables.groups
        deaths = (groups[idx].spec.death(num_dead[idx] - 1) for idx in self._mortal if num_dead[idx])
        return max(deaths, default=0)

    def point(self, seq_id: int, num_tokens: int) -> int:
        """Return the greatest length, `num_tokens` at most, to which a live sequence can be truncated.

        Args:
            seq_id: a live sequence.
            num_tokens: from `limit` to the slots that it has.
        """
        is_all = num_tokens == self._tables.sequences[seq_id].num_slots
        return num_tokens if is_all or not self._tables.carried else self.limit(seq_id)

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
            tables.carried and num_tokens not in (least, state.num_slots)
        ):
            to = f"{least} or {state.num_slots}" if tables.carried else f"[{least}, {state.num_slots}]"
            raise ValueError(f"cannot truncate to {num_tokens} tokens, only to {to}")
        tables.version += 1
        tables.shrink(state, num_tokens)
        state.num_computed = min(state.num_computed, num_tokens)
        state.num_published = min(state.num_published, num_tokens // tables.groups[0].spec.block_size)
        state.next_event = next_event(tables.groups, self._mortal, state)
        state.chain.truncate(num_tokens)
        if tables.observer is not None:
            tables.observer.truncated(seq_id, num_tokens)
