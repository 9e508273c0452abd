"""The publisher of KV events: numbered batches for all subscribers, and replays of the last batches on request.

```
 engine's thread     publish -> queue, bounded        a full queue drops the batch: its number is missing
 publisher's thread           encode -> PUB           topic | number, 8 bytes | msgpack
                              last batches -> ROUTER  request: first number; reply: "" | topic | number | msgpack, ...
```

A replay ends with the number -1. A request that begins with the number -1 asks for all blocks: the engine then
publishes them as a batch that begins with `AllBlocksCleared`, for all subscribers alike.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quire.config import KVEventsConfig
from quire.config.extras import importing_extra
from quire.distributed.kv_events.wire import EventBatch, encode_batch
from quire.errors import ConfigError
from quire.memory.kv_events import KVEvent

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

SEQ_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
# Limits when the publisher closes: for messages in ZeroMQ's queues, and for the thread.
LINGER_MS = 1000
JOIN_S = 5.0


class KVEventPublisher:
    """Publishes batches from a thread of its own.

    Args:
        config: endpoints and limits.
        on_resend: function that is called, in the publisher's thread, when a subscriber asks for all blocks.

    Attributes:
        endpoint: address of the batches, with the port that was taken.
        replay_endpoint: address of replays; None without them.
        topic: topic of the batches.
        num_dropped: number of batches that were dropped, because the queue was full.

    Raises:
        ConfigError: the extra is not installed, or an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig, on_resend: Callable[[], None] | None = None) -> None:
        with importing_extra("kv_events_config"):
            import zmq
        encode_batch(EventBatch(0.0, []), config.form)  # msgspec is needed too
        self.on_resend = on_resend
        self.num_dropped = 0
        self._config = config
        self.topic = config.topic
        self._next_seq = 0
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, float, list[KVEvent]]] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps or None)
        self._is_closing = False
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, config.endpoint)
            self._replay = None if config.replay_endpoint is None else self._open(zmq.ROUTER, config.replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _address_of(self._pub, config.endpoint)
        replay = config.replay_endpoint
        self.replay_endpoint = None if self._replay is None or replay is None else _address_of(self._replay, replay)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def next_seq(self) -> int:
        """Number of the next batch."""
        return self._next_seq

    def publish(self, events: list[KVEvent]) -> None:
        """Queue a batch; it is dropped if the queue is full. Any thread may call this."""
        with self._lock:
            seq = self._next_seq
            self._next_seq += 1
            if len(self._queue) >= self._config.max_queue_size:
                if not self.num_dropped:
                    logger.warning("the queue of KV events is full, so subscribers see a gap: batch %d is dropped", seq)
                self.num_dropped += 1
                return
            self._queue.append((seq, time.time(), events))
        self._wake()

    def close(self) -> None:
        """Send queued batches, for a limited time, and close the sockets; further calls do nothing."""
        if not self._is_closing:
            self._is_closing = True
            self._wake()
            self._thread.join(JOIN_S)

    # ---- the publisher's thread ----

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._is_closing:
                ready = {endpoint for endpoint, _ in poller.poll()}
                self._send_queued()
                if self._replay in ready:
                    self._serve_replay()
        except Exception:
            logger.exception("the publisher of KV events has failed; subscribers get no more")
        finally:
            self._send_queued()
            self._context.destroy(linger=LINGER_MS)
            self._woken.close()
            self._waker.close()

    def _send_queued(self) -> None:
        """Encode and send all queued batches."""
        with suppress(OSError):  # nothing to read
            self._woken.recv(4096)
        topic = self.topic.encode()
        while self._queue:
            seq, ts, events = self._queue.popleft()
            payload = encode_batch(EventBatch(ts, events, 0), self._config.form)
            if self._config.buffer_steps:
                self._sent.append((seq, payload))
            self._pub.send_multipart((topic, seq.to_bytes(SEQ_BYTES, "big"), payload))

    def _serve_replay(self) -> None:
        """Answer a request for a replay; a malformed request is ignored."""
        assert self._replay is not None
        identity, *frames = self._replay.recv_multipart()
        if not frames or len(frames[-1]) != SEQ_BYTES:
            return
        start, topic = int.from_bytes(frames[-1], "big", signed=True), self.topic.encode()
        if start < 0 and self.on_resend is not None:
            self.on_resend()
        for seq, payload in self._sent if start >= 0 else ():
            if seq >= start:
                self._replay.send_multipart((identity, b"", topic, seq.to_bytes(SEQ_BYTES, "big"), payload))
        self._replay.send_multipart((identity, b"", topic, END_OF_REPLAY, b""))

    # ---- parts ----

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """Return a socket that listens at an address of this machine, or is connected to one elsewhere."""
        import zmq

        opened: Any = self._context.socket(kind)
        opened.setsockopt(zmq.SNDHWM, self._config.hwm)
        try:
            if self._config.is_local(endpoint):
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config cannot use the endpoint {endpoint!r}: {error}", field="kv_events_config"
            ) from error
        return opened  # type: ignore[no-any-return]

    def _wake(self) -> None:
        """Wake the publisher's thread."""
        with suppress(OSError):  # enough is written already, or the thread has ended
            self._waker.send(b"\0")


def _address_of(opened: Any, endpoint: str) -> str:
    """Return the address at which a socket listens, or the one that it is connected to."""
    import zmq

    if "*" not in endpoint:
        return endpoint
    return str(opened.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
