"""Disk prefetch: loads a waiting prompt's blocks from disk or a remote source into host memory, before it is matched.

The scheduler calls it only for the next sequence to be admitted. A step loads at most as many tokens as it could
compute; a sequence with more blocks on disk waits until all are loaded. If ranks share a model, each has its shard of
every block in its own folder:

```
 rank 0   which blocks? worth it? -- verdict --> read --+
 rank 1                              the same    read --+--> all blocks before the first that some rank could not
 ...                                                    |    read are published, on every rank
```

Decisions that depend on time or on one rank's disk are made once, and blocks are read while steps are planned. So every
rank has the results in the same step, and a block that one rank lacks is a miss for all ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import torch

from quire.distributed.kvstore.counters import RemoteStats, StoreStats
from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.distributed.kvstore.record import record_key
from quire.distributed.ranks import Ranks
from quire.engine.kv.source_loads import SourceLoads
from quire.errors import LockstepDrift, RankFailed, WorkerError
from quire.execution.runners.executor import Executor
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import BlockCopy, FetchedBlock, MemoryOps, StoredBlock, Tier
from quire.memory.tiers.disk_tier import DiskLoad, DiskTier
from quire.scheduling.command_log import CommandStream
from quire.sequences.sequence import Sequence

logger = logging.getLogger(__name__)

# Every so many loads that are estimated slower than computing, one is made anyway, to measure the rate again.
REFUSALS = 16
# Limits of saving at shutdown: total seconds, and bytes of one part; the time is checked between parts.
SAVE_S = 20.0
PART_BYTES = 16 << 20
# Longest wait in a step without work, during which the engine handles no command.
WAIT_S = 0.005
# Time limit for ranks to save the prefix cache and exit, from when rank 0 has saved its shard.
END_TIMEOUT_S = 60.0


class DiskPrefetcher:
    """Loads stored blocks if that is faster than computing their tokens."""

    def __init__(
        self,
        disk_tier: DiskTier,
        disk: DiskBlocks,
        *,
        block_size: int,
        block_bytes: Seq[int],
        step_tokens: int,
        sources: SourceLoads | None = None,
        ranks: Ranks | None = None,
        commands: CommandStream | None = None,
    ) -> None:
        self._disk_tier = disk_tier
        self._disk = disk
        self._block_size = block_size
        self._block_bytes = tuple(block_bytes)
        self._step_blocks = max(1, step_tokens // block_size)
        self._free_blocks = self._step_blocks
        self._tokens_per_s: float | None = None
        self._num_refused = 0
        self._sources = sources
        self._ranks = ranks
        self._follows = ranks is not None and not ranks.is_leader
        self._commands = commands
        if ranks is not None:
            ranks.end_timeout_s = END_TIMEOUT_S

    def begin_step(self, tokens_per_s: float | None) -> None:
        """Reset the number of blocks that may be loaded, at the start of a step."""
        self._free_blocks = self._step_blocks
        self._tokens_per_s = tokens_per_s
        self._disk.save_arrived()
        if self._sources is not None:
            self._sources.begin_step()

    def prepare(self, sequence: Sequence) -> bool:
        """Load the blocks on disk of the sequence to be admitted next; return False while more must be loaded."""
        if self._follows:
            self._disk.save_arrived()  # a follower never calls `begin_step`, which would do so
        if sequence.is_staged:
            return True
        if self._ranks is not None and self._follows:
            return self._stage_as_told(self._ranks, sequence)
        if self._sources is not None and not self._sources.is_ready(sequence, self._tokens_per_s):
            return False
        num_blocks, loads = self._disk_tier.find_loads(sequence.chain, self._disk.holds, sequence.request.hit_limit)
        part: list[DiskLoad] | None = None
        if loads and (sequence.staged or self._is_worth_it(loads)):
            # The first missing block indices of the chain; an index includes the blocks of all groups.
            indices = sorted({load.block_idx for load in loads})[: self._free_blocks]
            self._free_blocks -= len(indices)
            # Blocks that were evicted again meanwhile are not loaded twice: the host tier is too small for them.
            if sequence.staged.isdisjoint(indices):
                part = [load for load in loads if load.block_idx in indices]
        return self._stage(sequence, num_blocks, part, is_last=part is None or len(part) == len(loads))

    def _stage(self, sequence: Sequence, num_blocks: int, part: Seq[DiskLoad] | None, *, is_last: bool) -> bool:
        """Load some blocks of a sequence, if any; return False while more must be loaded."""
        if self._ranks is not None and not self._follows:
            blocks = None if part is None else [[load.block.group_idx, load.block_idx] for load in part]
            verdict = [sequence.seq_id, num_blocks, blocks, is_last]
            self._ranks.send_commands(json.dumps(verdict, separators=(",", ":")).encode())
        if part is not None and self._load(sequence, num_blocks, part) and not is_last:
            return False
        if self._sources is not None and self._sources.lacks_required(sequence):
            return False
        sequence.is_staged = True
        if self._sources is not None:
            self._sources.forget(sequence)
        return True

    def _stage_as_told(self, ranks: Ranks, sequence: Sequence) -> bool:
        """Stage a sequence according to the verdict received from rank 0."""
        seq_id, num_blocks, blocks, is_last = json.loads(ranks.group.receive_commands())
        if seq_id != sequence.seq_id:
            raise LockstepDrift(f"rank 0 admits sequence {seq_id} next, and this rank {sequence.seq_id}")
        part = None
        if blocks is not None:
            describe = self._disk_tier.stored_block
            part = [DiskLoad(idx, describe(sequence.chain, group_idx, idx)) for group_idx, idx in blocks]
        return self._stage(sequence, num_blocks, part, is_last=is_last)

    def wait(self) -> None:
        """Wait briefly for the blocks of the next sequence, after a step without work."""
        if self._sources is not None:
            self._sources.wait(WAIT_S)

    def take_failed(self) -> list[tuple[str, str]]:
        """Return, and forget, the requests whose required blocks have not arrived, with the reasons."""
        if self._sources is None:
            return []
        failed, self._sources.failed = self._sources.failed, []
        return failed

    def write_through(self, executor: Executor) -> None:
        """Save the blocks of sequences that ended in a step, on all ranks, if the disk tier collects them."""
        ended = self._disk_tier.ended
        if not ended:
            return
        self._command("write_through")
        self._disk_tier.ended = []
        for chain, num_computed in ended:
            self.copy_out(executor, chain, num_computed // self._block_size, self._disk.lacks)

    def copy_out(
        self,
        executor: Executor,
        chain: TokenChain,
        num_blocks: int,
        wants: Callable[[StoredBlock], bool],
        *,
        exports: bool = False,
    ) -> Seq[StoredBlock]:
        """Copy published blocks of a chain to the stores, which write asynchronously, or only export them."""
        ops = self._disk_tier.exporting_ops(chain, num_blocks, wants)
        keys = [record_key(self._disk.identity, block) for block in ops.saves] if exports else None
        try:
            with self._disk.copying_out(keys):
                executor.move(ops)
        except WorkerError as error:
            logger.warning("blocks could not be copied out: %s", error)
            return ()
        return ops.saves

    def reset(self) -> None:
        """Delete all blocks that were saved until now."""
        self._disk.reset()

    def drop(self, ops: MemoryOps) -> None:
        """Drop the blocks that were read for copies of a failed step."""
        self._disk.drop(copy.src_id for copy in ops.copies if copy.src_tier is Tier.DISK)

    def _command(self, name: str) -> None:
        """Send a command to the other ranks; do nothing on other ranks than rank 0."""
        if self._commands is not None:
            self._commands.put(name)
            self._commands.flush()

    def save_all(self, executor: Executor, pending: MemoryOps, clock: Callable[[], float]) -> None:
        """Save the published blocks for the next start, on all ranks; nothing is saved after a rank has failed.

        Other ranks than rank 0 do nothing here: its command calls `save_shard`.
        """
        if self._follows or (self._ranks is not None and self._ranks.failure is not None):
            return
        try:
            self._command("save")
        except WorkerError as error:
            logger.warning("the prefix cache is not saved: %s", error)
            return
        self.save_shard(executor, pending, clock)

    def save_shard(self, executor: Executor, pending: MemoryOps, clock: Callable[[], float]) -> None:
        """Save the published blocks of this process for the next start; the process may be killed meanwhile.

        The blocks that would be evicted last are saved first, as far as disk space and time allow.
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

    @property
    def stats(self) -> StoreStats | None:
        """The counters of the prefix cache on disk; None without one."""
        return None if self._disk.disk is None else self._disk.disk.stats

    @property
    def remote_stats(self) -> RemoteStats | None:
        """The counters of the remote prefix cache; None without one."""
        return None if self._disk.remote is None else self._disk.remote.stats

    def _load(self, sequence: Sequence, num_blocks: int, loads: Seq[DiskLoad]) -> bool:
        """Load blocks and publish them on the host; return False if some could not be loaded."""
        fetched = [
            FetchedBlock(load.block.group_idx, load.block_idx, ticket)
            for load, ticket in zip(loads, self._fetch(loads), strict=False)
        ]
        published = set(self._disk_tier.publish_loaded(sequence.chain, num_blocks, fetched)) if fetched else set()
        self._disk.drop(block.ticket for block in fetched if block.ticket not in published)
        sequence.staged.update(block.block_idx for block in fetched if block.ticket in published)
        return len(published) == len(loads)

    def _fetch(self, loads: Seq[DiskLoad]) -> list[int]:
        """Read blocks until one is missing or damaged on some rank; return the tickets of the blocks before it."""
        tickets: list[int] = []
        for load in loads:
            ticket = self._disk.fetch(load.block)
            if ticket is None:
                break
            tickets.append(ticket)
        if self._ranks is None or not loads:
            return tickets
        is_read = torch.zeros(len(loads))
        is_read[: len(tickets)] = 1.0
        try:
            num_ranks = self._ranks.group.all_reduce(is_read)
        except RankFailed as error:
            raise self._ranks.cause_of(error) from error
        num_agreed = int((num_ranks == self._ranks.size).sum())
        self._disk.drop(tickets[num_agreed:])
        return tickets[:num_agreed]

    def _is_worth_it(self, loads: Seq[DiskLoad]) -> bool:
        """Return whether loading is faster than computing; True if a rate is unknown, or to measure it again."""
        store = self._disk
        rate = None if store.disk is None else store.disk.load_rate
        if self._tokens_per_s is None or rate is None:
            return True
        # Blocks that have arrived from a remote source are in memory already.
        num_bytes = sum(self._block_bytes[load.block.group_idx] for load in loads if not store.has_arrived(load.block))
        num_tokens = len({load.block_idx for load in loads}) * self._block_size
        if num_bytes / rate < num_tokens / self._tokens_per_s:
            return True
        self._num_refused += 1
        return self._num_refused % REFUSALS == 0
