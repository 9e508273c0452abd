"""The sockets of the hand-over of blocks under pressure: slow strangers, slow peers, and a lack of descriptors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from quire.distributed.kvstore import transfer
from quire.distributed.kvstore.record import record_bytes, record_key
from quire.distributed.kvstore.transfer import (
    GREETING,
    MAGIC,
    MOST_CONNECTIONS,
    READ,
    REQUEST,
    VERSION,
    PeerAddress,
    PeerConnection,
    Peers,
)
from tests.kvstore.descriptors import free_descriptors
from tests.kvstore.stores import PAYLOAD_BYTES, make_block
from tests.kvstore.test_transfer import COUNT, IDENTITY, WAIT_S, fetched, serving
from tests.waiting import wait_for

PAUSE_S = 0.02


@contextmanager
def sending_slowly(connections: list[socket.socket], message: bytes) -> Iterator[None]:
    """Send a message over each connection, a byte now and then."""
    done = threading.Event()

    def work() -> None:
        for idx in range(len(message)):
            for connection in connections:
                with suppress(OSError):
                    connection.sendall(message[idx : idx + 1])
            if done.wait(PAUSE_S):
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(WAIT_S)


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(WAIT_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_strangers_that_send_a_byte_now_and_then_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold all connections; a client takes the place of one that has made no progress."""
    monkeypatch.setattr(transfer, "FRESH_S", 0.3)
    greeting = GREETING.pack(MAGIC, VERSION, IDENTITY, bytes(16))
    with serving() as server, ExitStack() as stack:
        address = "127.0.0.1", server.port
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(MOST_CONNECTIONS)]
        wait_for(lambda: len(server._connections) == MOST_CONNECTIONS)
        with sending_slowly(strangers, greeting * 50):
            wait_for(lambda: fetched(server.port, COUNT) == list(range(COUNT)))
            # Each is ended in time, whether somebody wants its place or not.
            assert all(map(is_closed, strangers))
        assert server.num_turned_away >= MOST_CONNECTIONS
        wait_for(lambda: not server._connections)


def test_clients_that_have_greeted_give_their_places_when_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token anyone can greet; a client whose connection has rested makes a new one."""
    monkeypatch.setattr(transfer, "FRESH_S", 0.2)
    with serving() as server, ExitStack() as stack:
        peer = PeerAddress("127.0.0.1", server.port)
        resting = []
        for _ in range(MOST_CONNECTIONS):
            resting.append(PeerConnection(peer, IDENTITY, None, WAIT_S, record_bytes(PAYLOAD_BYTES)))
            stack.callback(resting[-1].close)
        wait_for(lambda: fetched(server.port, COUNT) == list(range(COUNT)))
        key = record_key(IDENTITY, make_block(1))
        assert all(one.find([key]) == [key] for one in resting[:3])


def test_a_client_that_reads_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MESSAGE_S", 0.3)
    with serving() as server:
        client = PeerConnection(PeerAddress("127.0.0.1", server.port), IDENTITY, None, WAIT_S, PAYLOAD_BYTES)
        keys = record_key(IDENTITY, make_block(0))[16:] * 20_000
        client._socket.sendall(REQUEST.pack(READ, 20_000) + keys)
        wait_for(lambda: server.num_sent > 0)
        wait_for(lambda: not server._connections)
        client.close()
        assert fetched(server.port, COUNT) == list(range(COUNT))


@pytest.mark.parametrize(
    "beginning", [b"", GREETING.pack(MAGIC, VERSION, IDENTITY, bytes(16))[:-1]], ids=["at once", "before the last byte"]
)
def test_an_engine_that_sends_a_byte_now_and_then_is_given_up_in_time(beginning: bytes) -> None:
    """Its bytes come faster than the time limit of a call that waits for the next byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        connections: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                connections.append(stack.enter_context(listener.accept()[0]))
                connections[0].sendall(beginning)

        accepting = threading.Thread(target=accept)
        accepting.start()
        peers = Peers(IDENTITY, None, 0.3, PAYLOAD_BYTES)
        source = peers.source_of(PeerAddress("127.0.0.1", listener.getsockname()[1]))
        inquiry = source.ask([record_key(IDENTITY, make_block(0))], with_records=True)
        accepting.join(WAIT_S)
        with sending_slowly(connections, b"Q" * 3000):
            assert inquiry is not None
            assert inquiry.done.wait(WAIT_S)
        assert isinstance(inquiry.error, TimeoutError | transfer.TransferError)
        assert peers.counters.num_failures == 1
        peers.close()


def test_without_descriptors_the_server_waits_counts_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        client = socket.socket()
        with client:
            client.settimeout(WAIT_S)
            with free_descriptors():
                client.connect(("127.0.0.1", server.port))
                wait_for(lambda: server.num_starved >= 3)
            # The connection is served once there are descriptors; nothing else is needed for that.
            client.sendall(GREETING.pack(MAGIC, VERSION, IDENTITY, bytes(16)))
            assert client.recv(4) == MAGIC
        assert fetched(server.port, COUNT) == list(range(COUNT))
        assert server.num_starved < 1000, "it tries again at once, and takes all of a core"
    assert sum("can take no connection" in record.message for record in caplog.records) == 1


def test_a_client_without_descriptors_has_a_miss() -> None:
    with serving() as server:
        peers = Peers(IDENTITY, None, WAIT_S, PAYLOAD_BYTES)
        source = peers.source_of(PeerAddress("127.0.0.1", server.port))
        keys = [record_key(IDENTITY, make_block(0))]
        with free_descriptors():
            starved = source.ask(keys, with_records=True)
            assert starved is not None
            assert starved.done.wait(WAIT_S)
        assert isinstance(starved.error, OSError)
        again = source.ask(keys, with_records=True)
        assert again is not None
        assert again.done.wait(WAIT_S)
        assert [*again.records] == keys
        peers.close()
