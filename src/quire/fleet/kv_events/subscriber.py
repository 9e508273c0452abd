"""The subscriber: it follows one publisher on an event loop, and requests missed batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from quire.config.extras import importing_extra
from quire.distributed.kv_events.publisher import END_OF_REPLAY, SEQ_BYTES
from quire.distributed.kv_events.wire import InvalidKVEvents, decode_batch
from quire.fleet.routing.feed import FeedState
from quire.memory.kv_events import KVEvent

if TYPE_CHECKING:
    import zmq.asyncio

logger = logging.getLogger(__name__)

# Silence after which the last batches are requested: batches before a subscription takes effect are missed.
QUIET_S = 1.0
# Time limit between two messages of a replay.
REPLAY_S = 2.0
# Time between two requests for all blocks.
RESEND_S = 2.0
# Longer messages are not batches of an engine, and end the connection.
MAX_MESSAGE = 256 << 20


class Apply(Protocol):
    """Function that applies a batch and returns the state of the feed; see `Router.apply`."""

    def __call__(self, seq: int, events: Sequence[KVEvent], *, is_replay: bool) -> FeedState: ...


class KVEventSubscriber:
    """Follows one publisher until `run` is cancelled."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        apply: Apply,
        next_seq: Callable[[], int],
        topic: str = "",
    ) -> None:
        with importing_extra("kv_events_config"):
            import zmq.asyncio
        self.num_invalid = self.num_replays = self.num_resends = 0
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._apply, self._next_seq = apply, next_seq
        self._topic = topic
        self._state = FeedState.UNKNOWN
        self._resent_s = float("-inf")
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()

    async def run(self) -> None:
        """Apply batches as they arrive."""
        import zmq

        batches = self._context.socket(zmq.SUB)
        try:
            self._limit(batches)
            batches.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            batches.connect(self._endpoint)
            await self._replay()
            while True:
                if not await batches.poll(int(QUIET_S * 1000)):
                    await self._replay()
                    continue
                frames = await batches.recv_multipart()
                if self._take(frames[1:], is_replay=False) is FeedState.GAP:
                    self.num_replays += 1
                    await self._replay()
        finally:
            self._context.destroy(linger=0)

    async def _replay(self) -> None:
        """Request the batches from the next one on, and if a gap remains, all blocks."""
        if self._replay_endpoint is None:
            return
        await self._ask(self._next_seq())
        now_s = asyncio.get_running_loop().time()
        if self._state is FeedState.GAP and now_s - self._resent_s > RESEND_S:
            self._resent_s = now_s
            self.num_resends += 1
            await self._ask(-1)

    async def _ask(self, start: int) -> None:
        """Request batches and apply them; stop if the next message is late."""
        import zmq

        replay = self._context.socket(zmq.DEALER)
        try:
            self._limit(replay)
            replay.connect(str(self._replay_endpoint))
            await replay.send_multipart([b"", start.to_bytes(SEQ_BYTES, "big", signed=True)])
            while await replay.poll(int(REPLAY_S * 1000)):
                *_, seq, payload = await replay.recv_multipart()
                if seq == END_OF_REPLAY:
                    break
                self._take([seq, payload], is_replay=True)
        finally:
            replay.close(linger=0)

    def _take(self, frames: Sequence[bytes], *, is_replay: bool) -> FeedState:
        """Apply a message; one that is not a batch counts as lost."""
        try:
            if len(frames) != 2 or len(frames[0]) != SEQ_BYTES:
                raise InvalidKVEvents(f"a message of KV events must have 3 frames, got {len(frames) + 1}")
            events = decode_batch(frames[1]).events
        except InvalidKVEvents as error:
            if not self.num_invalid:
                logger.warning("%s sent what is no batch of KV events: %s", self._endpoint, error)
            self.num_invalid += 1
            return self._state
        self._state = self._apply(int.from_bytes(frames[0], "big"), events, is_replay=is_replay)
        return self._state

    @staticmethod
    def _limit(connected: zmq.asyncio.Socket) -> None:
        import zmq

        connected.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        connected.setsockopt(zmq.RCVHWM, 100_000)
