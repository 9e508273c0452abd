"""Remote loads: a waiting prompt's blocks are requested from a remote store, or from another engine, and awaited.

```
 is_ready?   which missing blocks does it have?  -> the longest hit with them -> request their records -> arrived
             other sequences run meanwhile; the prompt waits for each answer up to a timeout
```

The timeout of an answer is no longer than computing the tokens would take: a slow source counts as a miss.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from quire.distributed.kvstore.counters import SourceCounters
from quire.distributed.kvstore.disk_blocks import Arrival, DiskBlocks
from quire.distributed.kvstore.record import record_key
from quire.distributed.kvstore.sources import Inquiry, SourcePool
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import StoredBlock
from quire.memory.tiers.disk_tier import DiskLoad, DiskTier
from quire.sequences.sequence import Sequence

logger = logging.getLogger(__name__)

# Least timeout: a first round trip takes some time, however few tokens there are to compute.
LEAST_PATIENCE_S = 0.02
# Greatest number of sequences with a search in progress; normally one, the next to be admitted.
MOST_SEARCHES = 64
MOST_READ_BYTES = 256 << 20


class PlannedSource(NamedTuple):
    """A slow source of a sequence's blocks.

    Args:
        pool: threads that ask it.
        timeout_s: longest wait for an answer.
        must_have: True if the request fails when its blocks do not arrive; False if they are computed here then.
    """

    pool: SourcePool
    timeout_s: float
    must_have: bool = False


@dataclass(slots=True)
class _Search:
    """A search for blocks: sources to ask, the current one with the pending request, and arrived keys."""

    sources: list[PlannedSource]
    current: PlannedSource | None = None
    inquiry: Inquiry | None = None
    asked_s: float = 0.0
    deadline_s: float = 0.0
    # The requested blocks, here and at the source, by their keys at the source; and keys, here, of arrived records.
    asked: dict[bytes, tuple[StoredBlock, StoredBlock]] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    # True if the request fails without the whole prompt; True if it has failed.
    must_have: bool = False
    has_failed: bool = False


class SourceLoads:
    """Asks the sources of a sequence's blocks, one after the other, and puts the records into the store."""

    def __init__(
        self,
        disk_tier: DiskTier,
        store: DiskBlocks,
        sources_of: Callable[[Sequence], list[PlannedSource]],
        chain_of: Callable[[Sequence], TokenChain],
        *,
        block_bytes: Seq[int],
        block_size: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._disk_tier = disk_tier
        self._store = store
        self._sources_of, self._chain_of = sources_of, chain_of
        self._block_bytes = tuple(block_bytes)
        self._block_size = block_size
        self._clock = clock
        self._searches: OrderedDict[int, _Search] = OrderedDict()
        self._waiting: Inquiry | None = None
        self.failed: list[tuple[str, str]] = []

    def begin_step(self) -> None:
        """Forget the request that the last step waited for."""
        self._waiting = None

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the answer that a step without other work needs."""
        if self._waiting is not None:
            self._waiting.done.wait(timeout_s)

    def is_ready(self, sequence: Sequence, tokens_per_s: float | None) -> bool:
        """Return whether the search for a sequence's blocks is complete; else start or continue it."""
        search = self._searches.get(sequence.seq_id)
        if search is None:
            search = self._searches[sequence.seq_id] = _Search(self._sources_of(sequence))
            if len(self._searches) > MOST_SEARCHES:
                self._drop(self._searches.popitem(last=False)[1])
            search.must_have = any(source.must_have for source in search.sources)
            self._ask_next(sequence, search, tokens_per_s)
        while search.inquiry is not None and search.current is not None:
            inquiry, pool = search.inquiry, search.current.pool
            now = self._clock()
            if not inquiry.done.is_set() and now < search.deadline_s:
                self._waiting = inquiry
                return False
            pool.end(inquiry, now - search.asked_s)
            if inquiry.with_records:
                self._take(search, inquiry, pool.counters)
            elif self._ask_records(sequence, search, tokens_per_s):
                continue
            self._ask_next(sequence, search, tokens_per_s)
        return not search.has_failed

    def lacks_required(self, sequence: Sequence) -> bool:
        """Return whether a sequence's blocks were all required, and some are not in memory after its loads.

        They were damaged, or the host has no room for them; the request fails then.
        """
        search = self._searches.get(sequence.seq_id)
        if search is not None and search.must_have and not self._has_whole_prompt(sequence, lambda _: False):
            self._fail(sequence, search, "not all of the prompt's blocks could be used")
        return search is not None and search.has_failed

    def forget(self, sequence: Sequence) -> None:
        """Drop the records that arrived for a sequence and were not used."""
        search = self._searches.pop(sequence.seq_id, None)
        if search is not None:
            self._drop(search)

    # ---- parts ----

    def _ask_next(self, sequence: Sequence, search: _Search, tokens_per_s: float | None) -> None:
        """Ask the next source which of the missing blocks it has, if any are missing."""
        last, search.inquiry = search.current, None
        while True:
            missing = self._disk_tier.find_missing(sequence.chain, sequence.request.hit_limit)
            missing = [load for load in missing if not self._store.holds(load.block)]
            if last is not None and last.must_have and not self._has_whole_prompt(sequence, self._store.holds):
                self._fail(sequence, search, "not all of the prompt's blocks have arrived")
                return
            if not search.sources or not missing:
                search.current = None
                return
            last = search.current = search.sources.pop(0)
            search.inquiry = last.pool.ask(self._keys_of(sequence, search, missing), with_records=False)
            if search.inquiry is not None:
                self._set_deadline(search, len(missing), tokens_per_s)
                return

    def _fail(self, sequence: Sequence, search: _Search, why: str) -> None:
        if not search.has_failed:
            search.has_failed = True
            self.failed.append((sequence.request.request_id, why))

    def _ask_records(self, sequence: Sequence, search: _Search, tokens_per_s: float | None) -> bool:
        """Ask the current source for the records of the longest hit; return False if it has none of them."""
        assert search.inquiry is not None
        assert search.current is not None
        store, records = self._store, search.inquiry.records
        found = {search.asked[key][0] for key in search.inquiry.keys if key in records}

        def is_there(block: StoredBlock) -> bool:
            return store.holds(block) or block in found

        loads = self._disk_tier.find_loads(sequence.chain, is_there, sequence.request.hit_limit).loads
        wanted, num_bytes = [], 0
        for load in loads:
            if not store.holds(load.block):
                num_bytes += self._block_bytes[load.block.group_idx]
                if num_bytes > MOST_READ_BYTES:
                    break
                wanted.append(load)
        search.current.pool.counters.num_misses += len(search.inquiry.keys) - len(records)
        if not wanted:
            return False
        search.inquiry = search.current.pool.ask(self._keys_of(sequence, search, wanted), with_records=True)
        if search.inquiry is None:
            return False
        self._set_deadline(search, len({load.block_idx for load in wanted}), tokens_per_s)
        return True

    def _keys_of(self, sequence: Sequence, search: _Search, loads: Seq[DiskLoad]) -> list[bytes]:
        """Return the keys of blocks at the sources, and register them as asked for."""
        chain, describe = self._chain_of(sequence), self._disk_tier.stored_block
        blocks = [(block, describe(chain, block.group_idx, block_idx)) for block_idx, block in loads]
        search.asked = {record_key(self._store.identity, stored): (block, stored) for block, stored in blocks}
        return [*search.asked]

    def _set_deadline(self, search: _Search, num_blocks: int, tokens_per_s: float | None) -> None:
        assert search.current is not None
        patience_s = search.current.timeout_s
        if tokens_per_s is not None and not search.current.must_have:
            computing_s = num_blocks * self._block_size / tokens_per_s
            patience_s = min(patience_s, max(LEAST_PATIENCE_S, computing_s))
        search.asked_s = self._clock()
        search.deadline_s = search.asked_s + patience_s

    def _take(self, search: _Search, inquiry: Inquiry, counters: SourceCounters) -> None:
        """Put the records that have arrived into the store; other threads may still add some."""
        for key in inquiry.keys:
            record = inquiry.records.get(key)
            if record is None:
                counters.num_misses += 1
            else:
                block, stored = search.asked[key]
                own_key = record_key(self._store.identity, block)
                self._store.arrived[own_key] = Arrival(record, stored, counters)
                search.keys.append(own_key)

    def _has_whole_prompt(self, sequence: Sequence, holds: Callable[[StoredBlock], bool]) -> bool:
        hit_limit = sequence.request.hit_limit
        most = len(sequence.tokens) - 1 if hit_limit is None else min(len(sequence.tokens) - 1, hit_limit)
        plan = self._disk_tier.find_loads(sequence.chain, holds, hit_limit)
        return plan.num_blocks >= most // self._block_size

    def _drop(self, search: _Search) -> None:
        if search.inquiry is not None and search.current is not None and not search.inquiry.done.is_set():
            search.current.pool.abandon(search.inquiry)
        for key in search.keys:
            self._store.arrived.pop(key, None)
