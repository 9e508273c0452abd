"""Sources of blocks: the protocol of the disk, a remote store and other engines, and the threads that ask slow ones.

```
 engine's thread    ask -> queue --.                         end, answered or too late
                                   v                            |
 a pool's threads                 [ source ]   found <-- record, record, ...
```

The engine's thread never waits for a slow source: it polls an inquiry between steps, and uses the records that have
arrived by its deadline. A source that exceeds its time limit is interrupted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple, Protocol

from quire.distributed.kvstore.counters import SourceCounters

logger = logging.getLogger(__name__)

# Limits of a circuit breaker.
MOST_FAILURES = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
# Limits of a pool: queued inquiries, and the wait for a thread at the end.
MOST_QUEUED = 64
CLOSE_S = 2.0

Record = bytes | memoryview


class WriteBatch(NamedTuple):
    """Changes to make together: deletions, marks of use, evictions, then additions.

    Args:
        removed: keys of records to delete; keys without a record are ignored.
        forgotten: identity whose records are deleted, on disk `most_forgotten` of them; None to delete no identity's.
        most_forgotten: see `forgotten`.
        touched: keys of records that were used, the least recently used first.
        records: records to add; records that exist already count as used.
        most_bytes: limit of the bytes of all records; the least recently used are deleted. None for no limit.
        freed_bytes: bytes of least recently used records to delete, independent of the limit.
        num_resets: number of resets of the store before this batch.
    """

    removed: Sequence[bytes] = ()
    forgotten: bytes | None = None
    most_forgotten: int = 4096
    touched: Sequence[bytes] = ()
    records: Mapping[bytes, bytearray] = {}
    most_bytes: int | None = None
    freed_bytes: int = 0
    num_resets: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the batch changes nothing."""
        return not any((self.removed, self.forgotten, self.touched, self.records, self.freed_bytes))


class Written(NamedTuple):
    """The changes that were made."""

    num_added: int
    evicted: tuple[bytes, ...] = ()
    num_forgotten: int = 0


class RecordSource(Protocol):
    """An adapter to records of blocks: a file, or a connection that one thread uses at a time.

    Those that this engine writes to also have `put(batch: WriteBatch) -> Written`, which a `WriteQueue` calls.
    """

    def find(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that the source has, in their order."""

    def fetch(self, keys: Sequence[bytes], put: Callable[[bytes, Record], None]) -> None:
        """Pass the records that the source has to `put`, each with its key, in the order of the keys."""

    def close(self) -> None:
        """Close the file or the connection."""


class SlowSource(RecordSource, Protocol):
    """A source that a pool of threads asks."""

    def interrupt(self) -> None:
        """Fail the call in progress; called by another thread."""


class CircuitBreaker:
    """Decides whether a service is called. Open after `MOST_FAILURES` in a row; each further one doubles the pause.

    After a pause one caller may try; the next pause begins with that.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._closed_from_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open: the service is not called now."""
        with self._lock:
            return self._num_failures >= MOST_FAILURES and self._clock() < self._closed_from_s

    def allows(self) -> bool:
        """Return whether to call the service now; after a pause, True for one caller (a trial), then a new pause."""
        with self._lock:
            if self._num_failures < MOST_FAILURES:
                return True
            now = self._clock()
            if now < self._closed_from_s:
                return False
            self._closed_from_s = now + self._pause_s
            return True

    def succeeded(self) -> None:
        """Close the circuit."""
        with self._lock:
            self._num_failures = 0

    def failed(self) -> None:
        """Count a failure; open the circuit after `MOST_FAILURES` in a row."""
        with self._lock:
            self._num_failures += 1
            self._closed_from_s = self._clock() + self._pause_s

    @property
    def _pause_s(self) -> float:
        power = min(max(0, self._num_failures - MOST_FAILURES), 16)
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * float(2**power))


@dataclass(slots=True, eq=False)
class Inquiry:
    """An inquiry about keys to a source, and the part of its answer that has arrived."""

    keys: tuple[bytes, ...]
    # True to read the records, False to ask only which of them exist.
    with_records: bool
    # Records by key; without `with_records`, empty bytes for each key that exists. Other threads add to it.
    records: dict[bytes, Record] = field(default_factory=dict)
    # Set once nothing more will arrive.
    done: threading.Event = field(default_factory=threading.Event)
    # Reason why the answer is not complete.
    error: Exception | None = None
    # True once no caller waits for the answer.
    is_abandoned: bool = False
    # Time at which a thread sent it.
    started_s: float | None = None


class SourcePool:
    """Threads that answer inquiries to one source, each with its own connection, within `timeout_s` from the sending.

    `may_ask` returns whether the source may be asked now; `learn` receives each inquiry at its end, answered or not.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], SlowSource],
        timeout_s: float,
        num_threads: int,
        counters: SourceCounters,
        *,
        breaker: CircuitBreaker | None = None,
        may_ask: Callable[[], bool] = lambda: True,
        learn: Callable[[Inquiry], None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.counters = counters
        self._connect, self._timeout_s, self._clock = connect, timeout_s, clock
        self._breaker = breaker or CircuitBreaker(clock)
        self._may_ask, self._learn = may_ask, learn
        self._queue: queue.Queue[Inquiry | None] = queue.Queue(MOST_QUEUED)
        self._lock = threading.Lock()
        self._running: dict[Inquiry, SlowSource] = {}
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def ask(self, keys: Sequence[bytes], *, with_records: bool) -> Inquiry | None:
        """Ask which records the source has, or for the records; None if the source cannot be asked now."""
        self._cut_off()
        inquiry = Inquiry(tuple(keys), with_records)
        try:
            if not self._is_closed and self._may_ask() and self._breaker.allows():
                self._queue.put_nowait(inquiry)
                return inquiry
        except queue.Full:
            pass
        self.counters.num_refused += 1
        return None

    def end(self, inquiry: Inquiry, waited_s: float) -> None:
        """Count an inquiry that was awaited for `waited_s` seconds; an incomplete one counts as late, and is abandoned.

        The connection is cut off once its time limit has passed.
        """
        self.counters.load_s += waited_s
        if not inquiry.done.is_set():
            self.counters.num_late += 1
            self.abandon(inquiry)
        self._learn(inquiry)

    def abandon(self, inquiry: Inquiry) -> None:
        """Stop waiting for an inquiry; its connection is cut off once its time limit has passed."""
        inquiry.is_abandoned = True
        self._cut_off(inquiry)

    def close(self, *, wait: bool = True) -> None:
        """End the threads; with `wait`, wait up to `CLOSE_S` for each."""
        self._is_closed = True
        with self._lock:
            for source in self._running.values():
                source.interrupt()
        for _ in self._threads:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                # A thread that takes a queued inquiry ends as well.
                break
        for thread in self._threads if wait else ():
            thread.join(CLOSE_S)

    def _cut_off(self, only: Inquiry | None = None) -> None:
        """Interrupt running inquiries whose time limit has passed: all of them, or only one."""
        started_by = self._clock() - self._timeout_s
        with self._lock:
            for inquiry, source in self._running.items():
                if only in (None, inquiry) and inquiry.started_s is not None and inquiry.started_s <= started_by:
                    source.interrupt()

    def _run(self) -> None:
        source: SlowSource | None = None
        while True:
            inquiry = self._queue.get()
            if inquiry is None or self._is_closed:
                break
            if not inquiry.is_abandoned:
                try:
                    source = source or self._connect()
                    self._answer(inquiry, source)
                # The client library raises errors of any kind when another thread cuts its connection off.
                except Exception as error:
                    inquiry.error = error
                    with self._lock:
                        self.counters.num_failures += 1
                    self._breaker.failed()
                    logger.debug("a source of blocks has failed: %r", error)
                    if source is not None:
                        source.close()
                    source = None
            inquiry.done.set()
        if source is not None:
            source.close()

    def _answer(self, inquiry: Inquiry, source: SlowSource) -> None:
        """Answer an inquiry."""
        inquiry.started_s = self._clock()
        with self._lock:
            self._running[inquiry] = source
        try:
            if inquiry.with_records:
                source.fetch(inquiry.keys, inquiry.records.__setitem__)
            else:
                inquiry.records.update(dict.fromkeys(source.find(inquiry.keys), b""))
        finally:
            with self._lock:
                del self._running[inquiry]
        self._breaker.succeeded()
