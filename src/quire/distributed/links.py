"""Connections between rank 0 and each other rank: for facts at the start, errors, and the end of a process.

The system closes the connections of a process that ends, for any reason. A thread of each process reads the
connections, so it notices the end of another process within milliseconds. Messages are lines of JSON.
"""

from __future__ import annotations

import json
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import quire.errors
from quire.errors import ConfigError, LockstepDrift, QuireError, RankFailed, WorkerError

logger = logging.getLogger(__name__)

# Rank 0's number, in whose process the engine runs.
LEADER: Final = 0
# Longest message: facts are short.
MAX_LINE: Final = 1 << 20


class RankLinks:
    """The connections of this process."""

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        describe: Callable[[int], str] = lambda _: "has ended",
        on_failure: Callable[[WorkerError | ConfigError], None] | None = None,
    ) -> None:
        self.failure: WorkerError | ConfigError | None = None
        self.on_failure = on_failure
        self._rank, self._sockets, self._describe = rank, dict(sockets), describe
        self._facts: dict[int, queue.SimpleQueue[Any]] = {peer: queue.SimpleQueue() for peer in sockets}
        self._failed, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._is_closing = self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="quire-ranks", daemon=True)
        self._thread.start()

    # ---- facts ----

    def send_fact(self, rank: int, fact: Any) -> None:
        """Send a JSON value to a rank."""
        self._send(rank, {"fact": fact})

    def receive_fact(self, rank: int, timeout_s: float) -> Any:
        """Return the next fact of a rank."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            if self._is_closed:
                raise WorkerError("the connections to other ranks are closed")
            try:
                return self._facts[rank].get(timeout=min(0.1, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise RankFailed(rank, f"did not answer within {timeout_s:g} s") from None

    def agree(self, fact: Any, combine: Callable[[list[Any]], Any], timeout_s: float) -> Any:
        """Return, on every rank, the JSON value that rank 0 makes of the facts of all, which are in their order.

        Errors are those of `receive_fact`; an error of `combine` is raised on every rank.
        """
        if self._rank != LEADER:
            self.send_fact(LEADER, fact)
            return self.receive_fact(LEADER, timeout_s)
        others = sorted(self._sockets)
        facts = [json.loads(json.dumps(fact)), *(self.receive_fact(rank, timeout_s) for rank in others)]
        try:
            result = combine(facts)
        except (ConfigError, WorkerError) as error:
            self.fail(error)
            raise
        for rank in others:
            self.send_fact(rank, result)
        return result

    # ---- failures ----

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within the context, an error of this rank is reported to the others, and closes the connections."""
        try:
            yield
        except BaseException as error:
            if self.failure is None:
                self.report(error)
            self.close()
            raise

    def check(self) -> None:
        """Raise the error of the rank that has failed, if any."""
        if self.failure is not None:
            raise self.failure

    def wait_for_failure(self, timeout_s: float) -> WorkerError | ConfigError | None:
        """Return the error of a failed rank; None if none fails within `timeout_s`."""
        self._failed.wait(timeout_s)
        return self.failure

    def report(self, error: BaseException) -> None:
        """Send an error of this rank to all linked ranks; that of an option or a file names this rank to them."""
        if isinstance(error, ConfigError):
            error = type(error)(f"rank {self._rank}: {error}", field=error.field)
        for rank in self._sockets:
            self._send(rank, {"error": error_to_json(error), "rank": self._rank})

    def fail(self, error: WorkerError | ConfigError) -> None:
        """Record a rank's failure, unless one is recorded; rank 0 sends it to the other ranks."""
        # `close` waits for the lock, so the others are told before the connections end.
        with self._lock:
            if self.failure is not None or self._is_closing:
                return
            self.failure = error
            failed_rank = error.rank if isinstance(error, RankFailed) else None
            for rank in self._sockets if self._rank == LEADER else ():
                if rank != failed_rank:
                    self._send(rank, {"error": error_to_json(error), "rank": failed_rank})
        self._failed.set()
        if self.on_failure is not None:
            self.on_failure(error)

    def close(self) -> None:
        """Close the connections; the end of another rank is no failure from now on. May be called twice."""
        self._is_closed = True
        with self._lock:
            self._is_closing = True
        for connection in self._sockets.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        for connection in self._sockets.values():
            connection.close()

    def expect_end(self) -> None:
        """Expect the other ranks to end from now on."""
        with self._lock:
            self._is_closing = True

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until all other ranks have closed their connections, for some time at most."""
        self._ended.wait(timeout_s)

    # ---- reading ----

    def _watch(self) -> None:
        """Read the connections until all are closed."""
        open_sockets = {connection: rank for rank, connection in self._sockets.items()}
        parts = dict.fromkeys(self._sockets, b"")
        while open_sockets:
            try:
                ready, _, _ = select.select([*open_sockets], [], [])
            except (OSError, ValueError):
                return  # closed here
            for connection in ready:
                rank = open_sockets[connection]
                try:
                    data = connection.recv(1 << 16)
                except OSError:
                    data = b""
                if not data:
                    del open_sockets[connection]
                    if not open_sockets:
                        self._ended.set()
                    if not self._is_closing:
                        self.fail(RankFailed(rank, self._describe(rank)))
                    continue
                *lines, parts[rank] = (parts[rank] + data).split(b"\n")
                for line in lines:
                    self._read(rank, line)
                if len(parts[rank]) > MAX_LINE:
                    self.fail(RankFailed(rank, "sent a message that is too long"))
                    del open_sockets[connection]

    def _read(self, rank: int, line: bytes) -> None:
        message = json.loads(line)
        if "fact" in message:
            self._facts[rank].put(message["fact"])
            return
        error = error_from_json(message["error"])
        failed_rank = message.get("rank")
        if not isinstance(error, WorkerError | ConfigError):
            error = RankFailed(rank if failed_rank is None else failed_rank, f"failed: {error}")
            error.__cause__ = error_from_json(message["error"])
        self.fail(error)

    def _send(self, rank: int, message: Any) -> None:
        try:
            self._sockets[rank].sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            logger.debug("rank %d cannot be told: its connection is closed", rank)


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return an error as a JSON value."""
    value: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, RankFailed):
        value |= {"rank": error.rank, "why": error.why}
    if isinstance(error, ConfigError):
        value["field"] = error.field
    return value


def error_from_json(value: Mapping[str, Any]) -> QuireError:
    """Return the error of a value of `error_to_json`; errors of other libraries become a `QuireError`."""
    if "why" in value:
        return RankFailed(value["rank"], value["why"])
    if value["type"] == LockstepDrift.__name__:
        return LockstepDrift(value["message"])
    kind = getattr(quire.errors, value["type"], None)
    if isinstance(kind, type) and issubclass(kind, ConfigError):
        return kind(value["message"], field=value.get("field"))
    if kind is not None:
        return QuireError(value["message"])
    return QuireError(f"{value['type']}: {value['message']}")
