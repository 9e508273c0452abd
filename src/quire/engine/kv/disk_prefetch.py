"""Staging: what of a waiting prompt lies on disk is brought to host memory before its prefix is matched.

The scheduler calls it for the sequence that is next to be let in: nothing is read for those who still wait long.
A step reads no more tokens than it could compute; a sequence with more on disk waits until all of it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from quire.errors import WorkerError
from quire.execution.executor import Executor
from quire.kvstore.disk_blocks import DiskBlocks
from quire.kvstore.prefix_store import StoreStats
from quire.memory.results import BlockCopy, FetchedBlock, MemoryOps, Tier
from quire.memory.tiers.disk_tier import DiskLoad, DiskTier
from quire.sequences.sequence import Sequence

logger = logging.getLogger(__name__)

# Of the loads that seem slower than computing, so many are left out before one is made, which measures anew.
REFUSALS = 16
# Saving at the end takes no longer than this, and one part of so many bytes: whoever shuts the engine down waits.
SAVE_S = 20.0
PART_BYTES = 16 << 20


class DiskPrefetcher:
    """Loads stored blocks where that is faster than computing their tokens.

    Args:
        disk_tier: the memory's verbs for it.
        disk: has the blocks; closed with this.
        block_size: tokens of a block.
        block_bytes: of each cache group.
        step_tokens: the most tokens of a step.
    """

    def __init__(
        self,
        disk_tier: DiskTier,
        disk: DiskBlocks,
        *,
        block_size: int,
        block_bytes: Seq[int],
        step_tokens: int,
    ) -> None:
        self._disk_tier = disk_tier
        self._disk = disk
        self._block_size = block_size
        self._block_bytes = tuple(block_bytes)
        self._step_blocks = max(1, step_tokens // block_size)
        self._free_blocks = self._step_blocks
        self._tokens_per_s: float | None = None
        self._num_refused = 0

    def begin_step(self, tokens_per_s: float | None) -> None:
        """Note that a step begins: it may load as much as one may.

        Args:
            tokens_per_s: how fast prompts are computed; None while nobody knows.
        """
        self._free_blocks = self._step_blocks
        self._tokens_per_s = tokens_per_s

    def prepare(self, sequence: Sequence) -> bool:
        """Bring up what is on disk of a sequence that is to be let in; False while there is more to come."""
        if sequence.is_staged:
            return True
        num_blocks, loads = self._disk_tier.find_loads(sequence.chain, self._disk.holds, sequence.request.hit_limit)
        if loads and (sequence.staged or self._is_worth_it(loads)):
            # The first indices of the chain, each with the blocks of all groups.
            indices = sorted({load.block_idx for load in loads})[: self._free_blocks]
            self._free_blocks -= len(indices)
            part = [load for load in loads if load.block_idx in indices]
            # What was lost again meanwhile is not loaded twice: the host is too small for it.
            is_new = sequence.staged.isdisjoint(indices)
            if is_new and self._load(sequence, num_blocks, part) and len(part) < len(loads):
                return False
        sequence.is_staged = True
        return True

    def reset(self) -> None:
        """Make nothing that was saved until now be hit again."""
        self._disk.reset()

    def drop(self, ops: MemoryOps) -> None:
        """Let go of what was read for copies that may not have been made."""
        self._disk.drop(copy.src_id for copy in ops.copies if copy.src_tier is Tier.DISK)

    def save_all(self, executor: Executor, pending: MemoryOps, clock: Callable[[], float]) -> None:
        """Save what is published, so that it is found after a restart; the process may be killed on the way.

        What is evicted last is worth most: it is saved first, as far as the disk has room and there is time.

        Args:
            executor: makes the movements.
            pending: movements that were asked for and not made yet.
            clock: in seconds.
        """
        deadline_s = clock() + SAVE_S
        ops = self._disk_tier.saving_ops()
        saved_bytes = 0
        try:
            executor.move(pending)
            for part, num_bytes in self._parts(ops.copies):
                if clock() > deadline_s:
                    logger.warning("after %g seconds, %d bytes of the prefix cache are saved", SAVE_S, saved_bytes)
                    break
                executor.move(MemoryOps(part, ops.saves))
                saved_bytes += num_bytes
        except WorkerError as error:
            logger.warning("not all of the prefix cache could be saved: %s", error)
        # And it is to be deleted last.
        self._disk.touch(ops.saves)

    def _parts(self, copies: Seq[BlockCopy]) -> Iterator[tuple[tuple[BlockCopy, ...], int]]:
        """Yield copies from the last one back, as far as the disk holds them, in parts; and the bytes of each part."""
        part: list[BlockCopy] = []
        part_bytes, num_bytes = 0, 0
        for copy in reversed(copies):
            block_bytes = self._block_bytes[copy.group_idx]
            num_bytes += block_bytes
            if num_bytes > self._disk.capacity:
                break
            part.append(copy)
            part_bytes += block_bytes
            if part_bytes >= PART_BYTES:
                yield tuple(part), part_bytes
                part, part_bytes = [], 0
        yield tuple(part), part_bytes

    def close(self) -> None:
        """Write what waits, and let go of the disk."""
        self._disk.close()

    @property
    def stats(self) -> StoreStats:
        """The counters of the store."""
        return self._disk.stats

    def _load(self, sequence: Sequence, num_blocks: int, loads: Seq[DiskLoad]) -> bool:
        """Read blocks and publish them on the host; False where not all of them could be had."""
        fetched = []
        for load in loads:
            ticket = self._disk.fetch(load.block)
            if ticket is None:
                break
            fetched.append(FetchedBlock(load.block.group_idx, load.block_idx, ticket))
        published = set(self._disk_tier.publish_loaded(sequence.chain, num_blocks, fetched)) if fetched else set()
        self._disk.drop(block.ticket for block in fetched if block.ticket not in published)
        sequence.staged.update(block.block_idx for block in fetched if block.ticket in published)
        return len(published) == len(loads)

    def _is_worth_it(self, loads: Seq[DiskLoad]) -> bool:
        """Say whether loading is faster than computing, as far as both have been measured."""
        stats = self._disk.stats
        if self._tokens_per_s is None or not stats.loaded_bytes:
            return True
        num_bytes = sum(self._block_bytes[load.block.group_idx] for load in loads)
        num_tokens = len({load.block_idx for load in loads}) * self._block_size
        if num_bytes * stats.load_s / stats.loaded_bytes < num_tokens / self._tokens_per_s:
            return True
        self._num_refused += 1
        return self._num_refused % REFUSALS == 0
