"""Which published blocks come after the same block, the youngest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

MANY = 0  # the null block, which is nobody's child


class Siblings:
    """The published children of each published or once published block, by its digest.

    Mostly there is one, so one entry is all that publishing a block costs.
    """

    __slots__ = ("_many", "only")

    def __init__(self) -> None:
        # By the parent's digest: its only child, or MANY.
        self.only: dict[bytes, int] = {}
        self._many: dict[bytes, dict[int, None]] = {}

    def add(self, parent: bytes, block_id: int) -> None:
        """Note a further child, the youngest."""
        if self.only.setdefault(parent, block_id) != block_id:
            self.crowd(parent, block_id)

    def add_run(self, parents: Sequence[bytes], block_ids: list[int]) -> None:
        """Note a further child of each parent, one after the other."""
        held = list(map(self.only.setdefault, parents, block_ids))
        # Mostly it is the first that has children already: there sequences part.
        if held[0] != block_ids[0]:
            self.crowd(parents[0], block_ids[0])
            held[0] = block_ids[0]
        if held != block_ids:
            for parent, block_id, other in zip(parents, block_ids, held, strict=True):
                if other != block_id:
                    self.crowd(parent, block_id)

    def crowd(self, parent: bytes, block_id: int) -> None:
        """Note a further child of a block that has one."""
        first = self.only[parent]
        if first != MANY:
            self._many[parent] = {first: None}
            self.only[parent] = MANY
        self._many[parent][block_id] = None

    def remove(self, parent: bytes, block_id: int) -> None:
        """Forget a child."""
        self.remove_run((parent,), (block_id,))

    def remove_run(self, parents: Iterable[bytes], block_ids: Iterable[int]) -> None:
        """Forget a child of each parent."""
        only = self.only
        for parent, block_id in zip(parents, block_ids, strict=True):
            if only[parent] == block_id:
                del only[parent]
            else:
                others = self._many[parent]
                del others[block_id]
                if not others:
                    del self._many[parent], only[parent]

    def of(self, parent: bytes, limit: int | None = None) -> list[int]:
        """Return the children of a block, the youngest first and at most `limit`."""
        child = self.only.get(parent)
        if child is None:
            return []
        return [child] if child != MANY else list(islice(reversed(self._many[parent]), limit))

    def snapshot(self) -> frozenset[tuple[bytes, tuple[int, ...]]]:
        """Return all children of all parents as a comparable value."""
        return frozenset((parent, tuple(self.of(parent))) for parent in self.only)
