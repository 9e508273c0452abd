"""How far a live sequence can be rolled back."""

from __future__ import annotations

from quire.memory.tables import BlockTables


class Rollback:
    """Answers questions of length; nothing here changes anything.

    Args:
        tables: of all sequences.
        mortal: the groups whose blocks die while the sequence lives.
    """

    __slots__ = ("_mortal", "_tables")

    def __init__(self, tables: BlockTables, mortal: tuple[int, ...]) -> None:
        self._tables = tables
        self._mortal = mortal

    def rollback_limit(self, seq_id: int) -> int:
        """Return the least length to which a live sequence can be truncated: before it, live tokens would be gone.

        With groups of states it is the only one: where it looked ahead from, else the length that it has.
        """
        state = self._tables.sequences[seq_id]
        if self._tables.carried:
            return state.num_slots if state.checkpoint is None else state.checkpoint.num_tokens
        num_dead, groups = state.num_dead, self._tables.groups
        deaths = (groups[idx].spec.death(num_dead[idx] - 1) for idx in self._mortal if num_dead[idx])
        return max(deaths, default=0)

    def rollback_point(self, seq_id: int, num_tokens: int) -> int:
        """Return the greatest length, `num_tokens` at most, to which a live sequence can be truncated.

        Args:
            seq_id: a live sequence.
            num_tokens: from `rollback_limit` to the slots that it has.
        """
        is_all = num_tokens == self._tables.sequences[seq_id].num_slots
        return num_tokens if is_all or not self._tables.carried else self.rollback_limit(seq_id)
