"""Bugs of the disk put in on purpose, and the nets that must catch them; see `test_seeded_bugs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from quire.errors import InvariantViolation
from quire.memory import BlockCopy, Tier, TokenChain
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.radix_node import NodePosition
from quire.memory.results import FetchedBlock
from quire.memory.tiers import disk_tier
from quire.memory.tiers.disk_tier import DiskSink, DiskTier
from tests.memory.nets import disk_reading_back, disk_twin, each_net

Patch = pytest.MonkeyPatch


def save_nothing(patch: Patch) -> None:
    patch.setattr(DiskSink, "keep", lambda *_: None)


def save_after_the_block_is_taken(patch: Patch) -> None:
    def save(self: DiskTier, group_idx: int, block_id: int, place: NodePosition) -> None:
        self._late.append(BlockCopy(group_idx, block_id, len(self._saves), Tier.HOST, Tier.DISK))  # type: ignore[attr-defined]
        self._saves.append(disk_tier.describe(group_idx, place))
        self.num_saves += 1

    honest = KVCacheManager.take_ops

    def take_ops(self: KVCacheManager) -> object:
        if self.archive is not None:
            self.tables.pending_copies += LATE.pop(id(self.archive), [])
        return honest(self)

    LATE: dict[int, list[BlockCopy]] = {}
    patch.setattr(DiskTier, "_late", property(lambda self: LATE.setdefault(id(self), [])), raising=False)
    patch.setattr(DiskTier, "save", save)
    patch.setattr(KVCacheManager, "take_ops", take_ops)


def publish_without_the_bytes(patch: Patch) -> None:
    honest = DiskTier.publish_loaded

    def publish_loaded(
        self: DiskTier, chain: TokenChain, num_blocks: int, fetched: Sequence[FetchedBlock]
    ) -> list[int]:
        adopted = honest(self, chain, num_blocks, fetched)
        pending = self._tables.pending_copies
        pending[:] = [copy for copy in pending if copy.src_tier is not Tier.DISK]
        return adopted

    patch.setattr(DiskTier, "publish_loaded", publish_loaded)


def load_into_the_next_place(patch: Patch) -> None:
    honest = DiskTier.publish_loaded

    def publish_loaded(
        self: DiskTier, chain: TokenChain, num_blocks: int, fetched: Sequence[FetchedBlock]
    ) -> list[int]:
        tickets = [block.ticket for block in fetched]
        mixed = [block._replace(ticket=ticket) for block, ticket in zip(fetched, reversed(tickets), strict=True)]
        return honest(self, chain, num_blocks, mixed)[::-1]

    patch.setattr(DiskTier, "publish_loaded", publish_loaded)


def let_loads_make_room_for_each_other(patch: Patch) -> None:
    patch.setattr(DiskTier, "_idle_blocks_needed", lambda *_: [])


def keep_what_was_adopted(patch: Patch) -> None:
    """Release nothing at the end: host blocks with holders that no table names."""
    honest = disk_tier._published
    patch.setattr(disk_tier, "_published", lambda pool, *place: honest(pool, *place) if pool.free else ())


def load_what_the_device_has(patch: Patch) -> None:
    patch.setattr(disk_tier.CombinedView, "_is_on_a_tier", lambda *_: False)


def load_dead_blocks(patch: Patch) -> None:
    honest = disk_tier.CombinedView.loads
    patch.setattr(disk_tier.CombinedView, "loads", lambda self, _, end: honest(self, 0, end))


CAUGHT: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (save_nothing, (disk_twin,)),
    (save_after_the_block_is_taken, (disk_reading_back, disk_twin)),
    (publish_without_the_bytes, (disk_reading_back, disk_twin)),
    (load_into_the_next_place, (disk_reading_back, disk_twin)),
    (let_loads_make_room_for_each_other, (disk_reading_back, disk_twin)),
    (keep_what_was_adopted, (disk_reading_back, disk_twin)),
    (load_what_the_device_has, (disk_reading_back, disk_twin)),
    (load_dead_blocks, (disk_twin,)),
]


@pytest.mark.parametrize(("seed_bug", "net"), each_net(CAUGHT))
def test_the_net_catches_the_bug(
    monkeypatch: pytest.MonkeyPatch, seed_bug: Callable[[Patch], None], net: Callable[[], None]
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation, LookupError, StopIteration, ValueError)):
        net()
