"""Disk prefetch: a waiting prompt's blocks on disk are loaded to host memory before its prefix is matched.

The scheduler calls it for the next sequence to be admitted only. A step loads at most the number of tokens that it
could compute; a sequence with more blocks on disk waits until all are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from quire.errors import WorkerError
from quire.execution.executor import Executor
from quire.kvstore.disk_blocks import DiskBlocks
from quire.kvstore.store_stats import StoreStats
from quire.memory.results import BlockCopy, FetchedBlock, MemoryOps, Tier
from quire.memory.tiers.disk_tier import DiskLoad, DiskTier
from quire.sequences.sequence import Sequence

logger = logging.getLogger(__name__)

# Number of loads that are skipped as slower than computing before one is made, to measure again.
REFUSALS = 16
# Limits of saving at the shutdown: seconds, and bytes of one part, between two checks of the time.
SAVE_S = 20.0
PART_BYTES = 16 << 20


class DiskPrefetcher:
    """Loads stored blocks where that is faster than computing their tokens.

    Args:
        disk_tier: the memory manager's disk tier.
        disk: blocks on disk; closed with this.
        block_size: number of tokens of a block.
        block_bytes: bytes of a block of each cache group.
        step_tokens: largest number of tokens of a step.
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
        """Reset the number of blocks that may be loaded, at the start of a step.

        Args:
            tokens_per_s: prefill rate; None while it is unknown.
        """
        self._free_blocks = self._step_blocks
        self._tokens_per_s = tokens_per_s

    def prepare(self, sequence: Sequence) -> bool:
        """Load the blocks on disk of the sequence to be admitted next; return False while more must be loaded."""
        if sequence.is_staged:
            return True
        num_blocks, loads = self._disk_tier.find_loads(sequence.chain, self._disk.holds, sequence.request.hit_limit)
        if loads and (sequence.staged or self._is_worth_it(loads)):
            # The first missing block indices of the chain, each with the blocks of all groups.
            indices = sorted({load.block_idx for load in loads})[: self._free_blocks]
            self._free_blocks -= len(indices)
            part = [load for load in loads if load.block_idx in indices]
            # Blocks that were evicted again meanwhile are not loaded twice: the host tier is too small for them.
            is_new = sequence.staged.isdisjoint(indices)
            if is_new and self._load(sequence, num_blocks, part) and len(part) < len(loads):
                return False
        sequence.is_staged = True
        return True

    def reset(self) -> None:
        """Delete all blocks that were saved until now."""
        self._disk.reset()

    def drop(self, ops: MemoryOps) -> None:
        """Drop the blocks that were read for copies of a failed step."""
        self._disk.drop(copy.src_id for copy in ops.copies if copy.src_tier is Tier.DISK)

    def save_all(self, executor: Executor, pending: MemoryOps, clock: Callable[[], float]) -> None:
        """Save the published blocks for the next start; the process may be killed meanwhile.

        The blocks that would be evicted last are saved first, as far as disk space and time allow.

        Args:
            executor: executor of the copies.
            pending: copies that were planned and not executed yet.
            clock: clock in seconds.
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
        # These blocks are to be deleted last.
        self._disk.touch(ops.saves)

    def _parts(self, copies: Seq[BlockCopy]) -> Iterator[tuple[tuple[BlockCopy, ...], int]]:
        """Yield copies in parts, from the last one back until the disk is full, with the bytes of each part."""
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
        """Complete the queued writes, and close the disk."""
        self._disk.close()

    @property
    def stats(self) -> StoreStats:
        """The counters of the store."""
        return self._disk.stats

    def _load(self, sequence: Sequence, num_blocks: int, loads: Seq[DiskLoad]) -> bool:
        """Load blocks and publish them on the host; return False where some could not be loaded."""
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
        """Return True where loading is faster than computing, or one of them has not been measured."""
        stats = self._disk.stats
        if self._tokens_per_s is None or not stats.loaded_bytes:
            return True
        num_bytes = sum(self._block_bytes[load.block.group_idx] for load in loads)
        num_tokens = len({load.block_idx for load in loads}) * self._block_size
        if num_bytes * stats.load_s / stats.loaded_bytes < num_tokens / self._tokens_per_s:
            return True
        self._num_refused += 1
        return self._num_refused % REFUSALS == 0
