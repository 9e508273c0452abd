"""Pinned prefixes: published blocks that are held by name, so that they are not evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from quire.memory.groups.cache_group import CacheGroup, find_prefix
from quire.memory.pool.arena import Arena
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import BlockCopy


class Pins:
    """Prefixes that are held by name, within a limit.

    Invariants: M2 counts pins.
    """

    __slots__ = ("_arena", "_tables", "_tokens", "limit")

    def __init__(self, arena: Arena, limit: int) -> None:
        self._arena = arena
        self.limit = limit
        self._tables: dict[str, list[list[int]]] = {}
        self._tokens: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def names(self) -> tuple[str, ...]:
        """Return the names of all pins."""
        return tuple(self._tables)

    def tokens(self) -> dict[str, int]:
        """Return the number of tokens of each pin, by name."""
        return dict(self._tokens)

    def blocks_of(self, name: str, group_idx: int) -> tuple[int, ...]:
        """Return the blocks of a group that a pin holds, in order."""
        return tuple(self._tables[name][group_idx])

    def blocks(self, group_idx: int) -> Iterator[int]:
        """Yield the pinned blocks of a group, each once for each pin."""
        for tables in tuple(self._tables.values()):
            yield from tables[group_idx]

    def can_add(self, block_ids: Sequence[Sequence[int]]) -> bool:
        """Return whether the limit allows to pin the additional blocks `block_ids`, one list for each group."""
        return self.num_filled(block_ids) <= self.limit

    def num_filled(self, block_ids: Sequence[Sequence[int]] = ()) -> int:
        """Return the number of slabs that pinned blocks and the additional blocks `block_ids` of each group fill."""
        return sum(
            self._arena.num_slabs_for(idx, len({*self.blocks(idx), *blocks} - {NULL_BLOCK}))
            for idx, blocks in enumerate(block_ids or ((),) * len(self._arena.pools))
        )

    def pin(self, name: str, groups: Sequence[CacheGroup], chain: TokenChain) -> int:
        """Hold the longest published prefix of whole blocks of a chain; see `KVCacheManager.pin`."""
        if name in self:
            raise ValueError(f"the name of a pin must be unused, got {name!r}")
        size = groups[0].spec.block_size
        run = find_prefix(groups, chain, len(chain.tokens) // size)
        if not run.num_blocks or not self.can_add(run.block_ids):
            return 0
        self.add(name, run.block_ids, run.num_blocks * size)
        return run.num_blocks * size

    def add(self, name: str, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Hold the blocks of a prefix of `num_tokens` tokens, one list for each group; null entries are left out."""
        tables = [[block_id for block_id in blocks if block_id != NULL_BLOCK] for blocks in block_ids]
        for pool, table in zip(self._arena.pools, tables, strict=True):
            pool.retain(table)
        self._tables[name] = tables
        self._tokens[name] = num_tokens

    def remove(self, name: str) -> None:
        """Release the blocks of a pin, the tail first."""
        tables = self._tables.pop(name)
        del self._tokens[name]
        for pool, table in zip(self._arena.pools, tables, strict=True):
            pool.release(reversed(table))

    def clear(self) -> None:
        """Remove all pins."""
        for name in tuple(self._tables):
            self.remove(name)

    def apply_move(self, move: BlockCopy) -> None:
        """Replace the id of a block that moved."""
        for tables in self._tables.values():
            table = tables[move.group_idx]
            if move.src_id in table:
                table[table.index(move.src_id)] = move.dst_id

    def snapshot(self) -> tuple[object, ...]:
        """Return all pins as a comparable value."""
        return tuple((name, tuple(map(tuple, tables))) for name, tables in sorted(self._tables.items()))

    def counts(self, group_idx: int) -> Counter[int]:
        """Return the number of pins of each block of a group."""
        return Counter(self.blocks(group_idx))
