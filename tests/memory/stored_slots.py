"""The content of every slot and state of a small world, and the copies between them.

What is stored at a slot is the whole prefix that its KV depends on.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.memory import BlockCopy, KVCacheManager, Namespace, Tier
from tests.memory.world_size import WorldSize

# What a slot's KV depends on: the namespace and all tokens and media up to its own; None before anything is written.
Content = tuple[Namespace, tuple[int, ...]] | None

# A block of a tier.
Place = tuple[Tier, int]


def prefixes_of(namespace: Namespace, tokens: list[int], count: int) -> list[Content]:
    """Return what each of the first slots of a sequence depends on."""
    return [(namespace, tuple(tokens[: position + 1])) for position in range(count)]


class StoredSlots:
    """What is stored in the arenas of all tiers, byte by byte: groups see the same bytes.

    Args:
        manager: manager of the blocks.
        size: size of the world.

    Attributes:
        contents: content by tier and byte.
        pending: copies that the manager asked for and that are not made yet.
    """

    def __init__(self, manager: KVCacheManager, size: WorldSize) -> None:
        self._manager = manager
        self._size = size
        self.contents: dict[Tier, dict[int, Content]] = {tier: {} for tier in Tier}
        self.pending: list[BlockCopy] = []

    def perform_copies(self) -> None:
        """Make the copies that the manager asked for, in order."""
        for group_idx, src_id, dst_id, src_tier, dst_tier in self.pending:
            assert 0 not in (src_id, dst_id), "the null block is copied"
            size = self._manager.arena.layout.block_bytes[group_idx]
            for offset in range(size):
                self.contents[dst_tier][dst_id * size + offset] = self.contents[src_tier].get(src_id * size + offset)
        self.pending = []

    def bytes_of(self, group_idx: int, block_id: int, offset: int) -> range:
        """Return the bytes of a slot."""
        token_bytes = self._manager.groups[group_idx].spec.bytes_per_block // self._size.block_size
        start = (block_id * self._size.block_size + offset) * token_bytes
        return range(start, start + token_bytes)

    def write(self, group_idx: int, block_id: int, offset: int, content: Content) -> None:
        """Store what a slot on the device depends on."""
        assert block_id != 0, "the null block is written"
        for byte in self.bytes_of(group_idx, block_id, offset):
            self.contents[Tier.DEVICE][byte] = content

    def _state_bytes(self, group_idx: int, block_id: int) -> range:
        """Return the bytes of a state."""
        size = self._manager.arena.layout.block_bytes[group_idx]
        return range(block_id * size, (block_id + 1) * size)

    def write_state(self, group_idx: int, block_id: int, content: Content) -> None:
        """Store what a state on the device depends on."""
        assert block_id != 0, "the null block is written"
        for byte in self._state_bytes(group_idx, block_id):
            self.contents[Tier.DEVICE][byte] = content

    def reads_back(self, group_idx: int, places: list[Place], prefixes: list[Content], query: int) -> None:
        """Assert that the query at a position reads what was stored (M5), as if all copies were made already."""
        kind = self._size.kinds[group_idx]
        if kind.is_state:
            if query:
                self.state_holds(group_idx, places[-1], prefixes[query - 1])
            return
        positions = [position for position in range(query) if kind.reads(query, position)]
        self.positions_hold(group_idx, places, prefixes, positions)

    def state_holds(self, group_idx: int, place: Place, content: Content) -> None:
        """Assert that a state is that of some tokens, as if all copies were made already."""
        tier, block_id = self._sources(group_idx).get(place, place)
        for byte in self._state_bytes(group_idx, block_id):
            assert self.contents[tier].get(byte) == content, f"M5: group {group_idx} has another state"

    def positions_hold(
        self, group_idx: int, places: list[Place], prefixes: list[Content], positions: Iterable[int]
    ) -> None:
        """Assert that slots are those of some tokens, as if all copies were made already."""
        sources = self._sources(group_idx)
        for position in positions:
            block_idx, offset = divmod(position, self._size.block_size)
            tier, block_id = sources.get(places[block_idx], places[block_idx])
            for byte in self.bytes_of(group_idx, block_id, offset):
                content = self.contents[tier].get(byte)
                assert content == prefixes[position], f"M5: group {group_idx} reads other tokens at {position}"

    def _sources(self, group_idx: int) -> dict[Place, Place]:
        """Return where the content of blocks lies that are still to be copied to."""
        sources: dict[Place, Place] = {}
        for idx, src_id, dst_id, src_tier, dst_tier in self.pending:
            if idx == group_idx:
                sources[dst_tier, dst_id] = sources.get((src_tier, src_id), (src_tier, src_id))
        return sources
