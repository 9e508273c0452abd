"""Asynchronous inquiries to a remote store or another engine, answered by a pool of threads.

```
 engine's thread    ask -> queue --.                         abandon, once too late
                                   v                            |
 a pool's threads                 [ connection ]  found <-- record, record, ...
```

The engine's thread never waits for a connection: it polls an inquiry between steps, and uses the records that have
arrived by its deadline. A connection that exceeds its time limit is cut off, whatever it is doing.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from quire.distributed.kvstore.circuit_breaker import CircuitBreaker

logger = logging.getLogger(__name__)

MOST_QUEUED = 64
CLOSE_S = 2.0


class SourceConnection(Protocol):
    """A connection to a source of blocks; one thread uses it at a time."""

    def which(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that the source has."""

    def read(self, keys: Sequence[bytes], put: Callable[[bytes, bytes], None]) -> None:
        """Pass the records that the source has to `put`, each with its key, in the order of the keys."""

    def interrupt(self) -> None:
        """Fail the call in progress; called by another thread."""

    def close(self) -> None:
        """Close the connection."""


class Inquiry:
    """An inquiry to a source, and the part of its answer that has arrived.

    Args:
        keys: keys of the records in question.
        with_records: True to read the records, False to ask only which of them exist.

    Attributes:
        found: records by key; without `with_records`, empty bytes for each key that exists. Other threads add to it.
        done: event that is set once nothing more will arrive.
        error: reason why the answer is not complete.
        is_abandoned: True once no caller waits for the answer.
        started_s: time at which a thread sent the inquiry.
    """

    def __init__(self, keys: Sequence[bytes], *, with_records: bool) -> None:
        self.keys = tuple(keys)
        self.with_records = with_records
        self.found: dict[bytes, bytes] = {}
        self.done = threading.Event()
        self.error: Exception | None = None
        self.is_abandoned = False
        self.started_s: float | None = None

    def put(self, key: bytes, record: bytes) -> None:
        """Add a record that has arrived."""
        self.found[key] = record


class SourcePool:
    """Threads that answer inquiries, each with its own connection.

    Args:
        name: name of the threads.
        connect: function that connects to the source, within a time limit.
        timeout_s: time limit of an inquiry, from the time at which a thread sends it.
        num_threads: number of threads.
        breaker: circuit breaker of the source.
        clock: clock in seconds.

    Attributes:
        num_failures: number of inquiries that failed.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], SourceConnection],
        timeout_s: float,
        num_threads: int,
        breaker: CircuitBreaker,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._breaker = breaker
        self._clock = clock
        self._queue: queue.Queue[Inquiry | None] = queue.Queue(MOST_QUEUED)
        self._lock = threading.Lock()
        self._running: dict[Inquiry, SourceConnection] = {}
        self._is_closed = False
        self.num_failures = 0
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def ask(self, inquiry: Inquiry) -> bool:
        """Queue an inquiry; return False where the circuit is open, or the queue is full."""
        self._cut_off()
        if self._is_closed or not self._breaker.allows():
            return False
        try:
            self._queue.put_nowait(inquiry)
        except queue.Full:
            return False
        return True

    def abandon(self, inquiry: Inquiry) -> None:
        """Stop waiting for an inquiry; its connection is cut off once its time limit has passed."""
        inquiry.is_abandoned = True
        self._cut_off(inquiry)

    def close(self, *, wait: bool = True) -> None:
        """End the threads; with `wait`, wait up to `CLOSE_S` for each."""
        self._is_closed = True
        with self._lock:
            for connection in self._running.values():
                connection.interrupt()
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
            for inquiry, connection in self._running.items():
                if only in (None, inquiry) and inquiry.started_s is not None and inquiry.started_s <= started_by:
                    connection.interrupt()

    def _run(self) -> None:
        connection: SourceConnection | None = None
        while True:
            inquiry = self._queue.get()
            if inquiry is None or self._is_closed:
                break
            if not inquiry.is_abandoned:
                try:
                    connection = self._answer(inquiry, connection or self._connect())
                # The client library raises errors of any kind where another thread cuts its connection off.
                except Exception as error:
                    inquiry.error = error
                    self.num_failures += 1
                    self._breaker.failed()
                    logger.debug("a source of blocks has failed: %r", error)
                    if connection is not None:
                        connection.close()
                    connection = None
            inquiry.done.set()
        if connection is not None:
            connection.close()

    def _answer(self, inquiry: Inquiry, connection: SourceConnection) -> SourceConnection:
        """Answer an inquiry; return the connection, which stays open. On an error the connection is closed."""
        inquiry.started_s = self._clock()
        with self._lock:
            self._running[inquiry] = connection
        try:
            if inquiry.with_records:
                connection.read(inquiry.keys, inquiry.put)
            else:
                inquiry.found.update(dict.fromkeys(connection.which(inquiry.keys), b""))
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                del self._running[inquiry]
        self._breaker.succeeded()
        return connection
