"""The disk prefix cache of a model sharded over ranks: each rank has its shard of every block in its own folder.

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
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from quire.distributed.ranks import Ranks
from quire.engine.kv.disk_prefetch import DiskPrefetcher
from quire.errors import LockstepDrift, RankFailed, WorkerError
from quire.execution.runners.executor import Executor
from quire.memory.results import MemoryOps
from quire.memory.tiers.disk_tier import DiskLoad
from quire.scheduling.command_log import CommandLog
from quire.sequences.sequence import Sequence

logger = logging.getLogger(__name__)

# Time limit for ranks to save the prefix cache and exit, from when rank 0 has saved its shard.
END_TIMEOUT_S = 60.0


class RankedPrefetcher(DiskPrefetcher):
    """The prefetcher of a rank, which agrees with the others on the blocks that were read."""

    def __init__(self, *args: Any, ranks: Ranks, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks = ranks
        ranks.end_timeout_s = END_TIMEOUT_S

    def _fetch(self, loads: Seq[DiskLoad]) -> list[int]:
        """Read blocks; return the tickets of those before the first that is missing or damaged on any rank."""
        tickets = super()._fetch(loads)
        if not loads:
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


class LeaderPrefetcher(RankedPrefetcher):
    """The prefetcher of rank 0, which makes the decisions."""

    log: CommandLog

    def _stage(self, sequence: Sequence, num_blocks: int, part: Seq[DiskLoad] | None, *, is_last: bool) -> bool:
        blocks = None if part is None else [[load.block.group_idx, load.block_idx] for load in part]
        verdict = [sequence.seq_id, num_blocks, blocks, is_last]
        self._ranks.send_commands(json.dumps(verdict, separators=(",", ":")).encode())
        return super()._stage(sequence, num_blocks, part, is_last=is_last)

    def write_through(self, executor: Executor) -> None:
        """See `DiskPrefetcher`; the other ranks do the same."""
        if self._disk_tier.ended:
            self._command("write_through")
            super().write_through(executor)

    def save_all(self, executor: Executor, pending: MemoryOps, clock: Callable[[], float]) -> None:
        """See `DiskPrefetcher`; the other ranks do the same meanwhile. Nothing is saved after a rank has failed."""
        if self._ranks.failure is None:
            try:
                self._command("save")
            except WorkerError as error:
                logger.warning("the prefix cache is not saved: %s", error)
                return
            super().save_all(executor, pending, clock)

    def _command(self, name: str) -> None:
        self.log.put(name)
        self.log.flush()


class FollowerPrefetcher(RankedPrefetcher):
    """The prefetcher of another rank, which follows the decisions of rank 0."""

    def prepare(self, sequence: Sequence) -> bool:
        """See `DiskPrefetcher`."""
        self._disk.save_arrived()  # a follower never calls `begin_step`, which would do so
        if sequence.is_staged:
            return True
        seq_id, num_blocks, blocks, is_last = json.loads(self._ranks.group.receive_commands())
        if seq_id != sequence.seq_id:
            raise LockstepDrift(f"rank 0 admits sequence {seq_id} next, and this rank {sequence.seq_id}")
        part = None
        if blocks is not None:
            describe = self._disk_tier.stored_block
            part = [DiskLoad(idx, describe(sequence.chain, group_idx, idx)) for group_idx, idx in blocks]
        return self._stage(sequence, num_blocks, part, is_last=is_last)

    def save_all(self, executor: Executor, pending: MemoryOps, clock: Callable[[], float]) -> None:
        """Do nothing: a command of rank 0 calls `repeat_save`."""

    def repeat_save(self, executor: Executor, pending: MemoryOps, clock: Callable[[], float]) -> None:
        """Save the prefix cache, as `DiskPrefetcher.save_all` does."""
        super().save_all(executor, pending, clock)
