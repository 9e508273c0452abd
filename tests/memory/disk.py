"""The disk of a small world: saved blocks, each under a number, loads of them, and blocks for other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.memory import BlockCopy, MemoryOps, Namespace, Tier, TokenChain
from quire.memory.invariants import snapshot
from quire.memory.results import FetchedBlock, StoredBlock
from quire.memory.tiers.disk_tier import DiskTier
from tests.memory.media import spans_of
from tests.memory.stored_slots import prefixes_of

if TYPE_CHECKING:
    from tests.memory.world import World

# Apart for each group, so that the numbers of no two groups name the same bytes.
GROUP_STRIDE = 1_000_000


class Disk:
    """The disk of a world; a block's number there serves as its ticket when it comes back.

    Args:
        world: whose manager has an archive.
        archive: of the manager.
    """

    def __init__(self, world: World, archive: DiskTier) -> None:
        self.world = world
        self.archive = archive
        self.numbers: dict[StoredBlock, int] = {}
        self.num_saves = 0
        self.num_resets = 0

    def note(self, ops: MemoryOps) -> list[BlockCopy]:
        """Return movements as the world makes them: each save under a number of its own."""
        copies = []
        for copy in ops.copies:
            if copy.dst_tier is Tier.DISK:
                block = ops.saves[copy.dst_id]
                assert block.group_idx == copy.group_idx
                self.num_saves += 1
                self.numbers[block] = copy.group_idx * GROUP_STRIDE + self.num_saves
                copy = copy._replace(dst_id=self.numbers[block])
            copies.append(copy)
        assert sum(copy.dst_tier is Tier.DISK for copy in copies) == len(ops.saves), "a save without a movement"
        return copies

    def load(self, tokens: list[int], namespace: Namespace, max_tokens: int | None = None) -> int:
        """Bring up what of a prompt is on disk only, and find that nothing of a hit is missing then."""
        world, manager = self.world, self.world.manager
        world.perform_copies()
        if world.num_resets != self.num_resets:
            self.num_resets = world.num_resets
            self.numbers.clear()
        chain = manager.chain(tokens, namespace, spans_of(tokens))
        before = snapshot(manager)
        missing = self.archive.find_missing(chain, max_tokens)
        num_blocks, loads = self.archive.find_loads(chain, self.numbers.__contains__, max_tokens)
        assert snapshot(manager) == before, "a question changed the manager"
        if world.has_twin and world.twin.host is not None:
            mine = [(load.block_idx, load.block.group_idx) for load in loads]
            assert mine == world.twin.host.find_loads(namespace, tokens, max_tokens, self.contents())
            digests = chain.digests(len(tokens) // world.size.block_size)
            names = [(digests.index(block.digest), block.group_idx) for _, block in missing]
            assert sorted(names) == world.twin.host.find_missing(namespace, tokens, max_tokens), "others are missing"
        fetched = [FetchedBlock(load.block.group_idx, load.block_idx, self.numbers[load.block]) for load in loads]
        adopted = self.archive.publish_loaded(chain, num_blocks, fetched)
        assert adopted == [block.ticket for block in fetched], "find_loads named more than there is room for"
        if world.has_twin and world.twin.host is not None:
            places = [(block.block_idx, block.group_idx) for block in fetched]
            world.twin.host.publish_loaded(namespace, tokens, num_blocks, places)
        world.verify()
        hit = manager.match_prefix(chain, max_tokens)
        assert hit.num_tokens >= num_blocks * world.size.block_size, "what was loaded is not found"
        self.verify_exports(chain, namespace)
        return len(adopted)

    def verify_exports(self, chain: TokenChain, namespace: Namespace) -> None:
        """Describe what of a prompt could be given to other engines, and find that its bytes are there."""
        world, size = self.world, self.world.size.block_size
        num_blocks = len(chain.tokens) // size
        before = snapshot(world.manager)
        ops = self.archive.exporting_ops(chain, num_blocks, lambda _: True)
        assert snapshot(world.manager) == before, "a question changed the manager"
        digests = chain.digests(num_blocks)
        exported = set()
        for copy in ops.copies:
            block = ops.saves[copy.dst_id]
            assert (copy.src_tier, copy.dst_tier, copy.group_idx) == (Tier.DEVICE, Tier.DISK, block.group_idx)
            idx = digests.index(block.digest)
            exported.add((idx, block.group_idx))
            prefixes = prefixes_of(namespace, chain.tokens, (idx + 1) * size)
            place = (Tier.DEVICE, copy.src_id)
            if world.size.kinds[block.group_idx].is_state:
                world.slots.state_holds(block.group_idx, place, prefixes[-1])
            else:
                positions = range(idx * size, (idx + 1) * size)
                world.slots.positions_hold(block.group_idx, [place] * (idx + 1), prefixes, positions)
        assert len(exported) == len(ops.copies) == len(ops.saves), "a block is given away twice"
        if world.has_twin:
            unwritten = {
                (copy.group_idx, copy.dst_id)
                for copy in world.manager.tables.pending_copies
                if copy.dst_tier is Tier.DEVICE
            }
            expected = {
                (idx, group_idx)
                for idx in range(num_blocks)
                for group_idx, group in enumerate(world.twin.groups)
                if (namespace, tuple(chain.tokens[: (idx + 1) * size])) in group.published
                and (group_idx, self._published(chain, group_idx, idx)) not in unwritten
            }
            assert exported == expected, "others are given away"

    def _published(self, chain: TokenChain, group_idx: int, block_idx: int) -> int:
        index = self.world.manager.groups[group_idx].pool.index
        return index.published(chain, block_idx, block_idx + 1)[0]

    def contents(self) -> set[tuple[int, Namespace, tuple[int, ...]]]:
        """Return what is on disk: the prefixes of whose last blocks the bytes are there."""
        contents = set()
        for block, number in self.numbers.items():
            slots = self.world.slots.bytes_of(block.group_idx, number, self.world.size.block_size - 1)
            content = self.world.slots.contents[Tier.DISK][slots[0]]
            assert content is not None, "a block was saved that held nothing"
            contents.add((block.group_idx, *content))
        return contents
