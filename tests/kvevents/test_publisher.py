"""The publisher over real sockets: numbers, replays, gaps, all blocks on request; and subscribers that follow it."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import pytest
import zmq

from quire.config import KVEventsConfig
from quire.distributed.kv_events.publisher import END_OF_REPLAY, KVEventPublisher
from quire.distributed.kv_events.wire import decode_batch
from quire.errors import ConfigError
from quire.fleet.kv_events.subscriber import KVEventSubscriber
from quire.fleet.routing.feed import FeedState
from quire.fleet.routing.router import Router
from quire.memory.kv_events import AllBlocksCleared, BlockRemoved, KVEvent, KVEventCollector
from tests.kvstore.descriptors import free_descriptors
from tests.memory.million import random_world
from tests.memory.test_kv_events import Consumer, published
from tests.memory.walk import random_walk

TIMEOUT_S = 30.0
ENDPOINT = "tcp://127.0.0.1:*"


def config_of(**options: object) -> KVEventsConfig:
    values = {"endpoint": ENDPOINT, "replay_endpoint": ENDPOINT, "enable_kv_cache_events": True, **options}
    return KVEventsConfig(**values)  # type: ignore[arg-type]


def removed(number: int) -> list[KVEvent]:
    return [BlockRemoved((number,), "GPU")]


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(config_of(buffer_steps=8))
    yield publisher
    publisher.close()


class Client:
    """A plain subscriber of vLLM's protocol."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.batches = self.context.socket(zmq.SUB)
        self.batches.setsockopt(zmq.SUBSCRIBE, b"")
        self.batches.connect(publisher.endpoint)
        self.replay = self.context.socket(zmq.REQ)
        self.replay.setsockopt(zmq.REQ_RELAXED, 1)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(str(publisher.replay_endpoint))
        self._publisher = publisher

    def subscribe(self) -> int:
        """Publish empty batches until one arrives, and return its number: subscriptions take effect later."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            self._publisher.publish([])
            if self.batches.poll(50):
                seq = self.receive()[0]
                while seq < self._publisher.next_seq - 1:
                    seq = self.receive()[0]
                return seq
        raise AssertionError("no batch arrived")

    def receive(self) -> tuple[int, list[KVEvent]]:
        assert self.batches.poll(int(TIMEOUT_S * 1000)), "no batch arrived"
        topic, seq, payload = self.batches.recv_multipart()
        assert topic == b""
        assert len(seq) == 8
        return int.from_bytes(seq, "big"), decode_batch(payload).events

    def ask(self, start: int) -> list[tuple[int, list[KVEvent]]]:
        self.dealer.send_multipart([b"", start.to_bytes(8, "big", signed=True)])
        found: list[tuple[int, list[KVEvent]]] = []
        while True:
            assert self.dealer.poll(int(TIMEOUT_S * 1000)), "the replay did not end"
            empty, topic, seq, payload = self.dealer.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if seq == END_OF_REPLAY:
                assert payload == b""
                return found
            found.append((int.from_bytes(seq, "big"), decode_batch(payload).events))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def client(publisher: KVEventPublisher) -> Iterator[Client]:
    client = Client(publisher)
    yield client
    client.close()


def test_strangers_and_a_lack_of_descriptors_cost_subscribers_nothing(
    publisher: KVEventPublisher, client: Client
) -> None:
    """Silent strangers, ones that send a byte now and then, and one that leaves in the middle of its greeting."""
    first = client.subscribe() + 1
    places = [urlsplit(endpoint or "") for endpoint in (publisher.endpoint, publisher.replay_endpoint)]
    with ExitStack() as stack:
        for idx in range(40):
            visitor = stack.enter_context(socket.create_connection((places[idx % 2].hostname, places[idx % 2].port)))
            visitor.sendall((b"", b"\xff", b"GET / HTTP/1.1\r\n\r\n")[idx % 3])
        late = [stack.enter_context(socket.socket()) for _ in places]
        with free_descriptors():
            for place, connection in zip(places, late, strict=True):
                connection.connect((place.hostname, place.port))
            for number in range(first, first + 8):
                publisher.publish(removed(number))
                assert client.receive() == (number, removed(number))
        assert client.ask(first) == [(number, removed(number)) for number in range(first, first + 8)]
        newcomer = Client(publisher)
        assert newcomer.subscribe() >= first + 8
        newcomer.close()


def test_batches_arrive_in_order_and_the_last_ones_again_on_request(
    publisher: KVEventPublisher, client: Client
) -> None:
    first = client.subscribe() + 1
    for number in range(first, first + 12):
        publisher.publish(removed(number))
    assert [client.receive() for _ in range(12)] == [(number, removed(number)) for number in range(first, first + 12)]
    last = [(number, removed(number)) for number in range(first + 4, first + 12)]
    assert client.ask(0) == last, "8 batches are kept"
    assert client.ask(first + 10) == last[-2:]
    assert client.ask(first + 12) == []


def test_a_full_queue_drops_batches_and_their_numbers_are_missing() -> None:
    publisher = KVEventPublisher(config_of(max_queue_size=2))
    client = Client(publisher)
    try:
        first = client.subscribe() + 1
        # Without a call to wake it, the thread does not empty the queue.
        publisher._queue.extend([(first - 1, 0.0, [])] * 2)
        publisher.publish(removed(1))
        assert publisher.num_dropped == 1
        publisher._wake()
        deadline = time.monotonic() + TIMEOUT_S
        while publisher._queue and time.monotonic() < deadline:
            time.sleep(0.01)
        publisher.publish(removed(2))
        numbers = [client.receive()[0] for _ in range(3)]
        assert numbers[-1] == first + 1, "the number of the batch that was dropped is missing"
    finally:
        client.close()
        publisher.close()


def test_a_request_for_all_blocks_is_passed_on_and_malformed_ones_are_ignored(
    publisher: KVEventPublisher, client: Client
) -> None:
    asked: list[int] = []
    publisher.on_resend = lambda: asked.append(1)
    client.dealer.send_multipart([b"", b"short"])
    client.dealer.send_multipart([b""])
    assert client.ask(-1) == []
    assert asked == [1]


def test_an_endpoint_that_is_in_use_is_refused(publisher: KVEventPublisher) -> None:
    with pytest.raises(ConfigError, match=r"cannot use the endpoint 'tcp://127.0.0.1:\d+': Address already in use"):
        KVEventPublisher(config_of(endpoint=publisher.endpoint))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def follow(publisher: KVEventPublisher, router: Router) -> KVEventSubscriber:
    router.add_replica("a")
    return KVEventSubscriber(
        publisher.endpoint,
        publisher.replay_endpoint,
        lambda seq, events, is_replay: router.apply("a", seq, events, is_replay=is_replay),
        lambda: router.feeds["a"].next_seq,
    )


def test_a_late_subscriber_has_the_earlier_batches_replayed(publisher: KVEventPublisher) -> None:
    for number in range(5):
        publisher.publish(removed(number))

    async def main() -> None:
        router = Router()
        subscriber = follow(publisher, router)
        task = asyncio.create_task(subscriber.run())
        await until(lambda: router.feeds["a"].next_seq == 5)
        assert router.feeds["a"].state is FeedState.SYNCED
        publisher.publish(removed(5))
        await until(lambda: router.feeds["a"].next_seq == 6)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_gap_that_no_replay_closes_is_closed_by_all_blocks(publisher: KVEventPublisher) -> None:
    publisher.on_resend = lambda: publisher.publish([AllBlocksCleared()])
    for number in range(20):  # 8 of them are kept
        publisher.publish(removed(number))

    async def main() -> None:
        router = Router()
        subscriber = follow(publisher, router)
        task = asyncio.create_task(subscriber.run())
        await until(lambda: router.feeds["a"].state is FeedState.SYNCED)
        assert subscriber.num_resends == 1
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 14))])
def test_a_subscriber_knows_the_published_blocks_after_every_command(seed: int) -> None:
    """Every command is a step with a batch; what arrives is applied to a plain set of blocks."""
    publisher = KVEventPublisher(config_of(form=("map", "array")[seed % 2]))
    client = Client(publisher)
    try:
        consumer, rng = Consumer(), random.Random(seed)
        expected = client.subscribe() + 1
        for _ in range(4):
            world = random_world(rng)
            collector = KVEventCollector(world.manager)
            verify = world.verify

            def publish(verify: Callable[[], None] = verify, collector: KVEventCollector = collector) -> None:
                verify()
                publisher.publish(collector.take_events())

            publisher.publish([AllBlocksCleared()])
            world.verify = publish  # type: ignore[method-assign]
            random_walk(world, rng, 200)
            while expected < publisher.next_seq:
                seq, events = client.receive()
                assert seq == expected
                expected += 1
                consumer.apply(events)
                if any(isinstance(event, AllBlocksCleared) for event in events):
                    consumer.contents.clear()
            assert consumer.blocks == set(published(world.manager))
        assert publisher.next_seq > 400
    finally:
        client.close()
        publisher.close()
