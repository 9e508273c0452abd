"""The hand-over of blocks between engines on the wire: what arrives is right, whatever happens to the connection."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from quire.config.kv_transfer import KVTransferConfig, read_kv_transfer
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.record import record_bytes, record_key, unpack
from quire.distributed.kvstore.sources import Record
from quire.distributed.kvstore.transfer import (
    GREETING,
    MOST_CONNECTIONS,
    MOST_KEYS,
    PROOF_BYTES,
    READ,
    REQUEST,
    WHICH,
    PeerAddress,
    PeerConnection,
    Peers,
    TransferError,
    TransferServer,
)
from quire.errors import ConfigError
from tests.kvstore.servers import Answer, relay
from tests.kvstore.stores import PAYLOAD_BYTES, make_block, payload_of
from tests.waiting import wait_for

IDENTITY = b"a" * 16
WAIT_S = 60.0
COUNT = 6


def make_config(**options: Any) -> KVTransferConfig:
    given: dict[str, Any] = {"kv_role": "kv_both", "kv_port": 0, **options}
    return KVTransferConfig(**given)


@contextmanager
def serving(count: int = COUNT, **options: Any) -> Iterator[TransferServer]:
    """Serve some blocks."""
    exports = ExportTable(1 << 24, 1000.0)
    for number in range(count):
        exports.put(record_key(IDENTITY, make_block(number)), make_block(number), payload_of(number))
    server = TransferServer(make_config(**options), IDENTITY, exports)
    try:
        yield server
    finally:
        server.close()
        server.close()


def fetched(port: int, count: int, *, host: str = "127.0.0.1", token: str | None = None, **options: Any) -> list[int]:
    """Return which of the first blocks are fetched whole and pass the checks; what passes must be right."""
    peers_identity = options.get("identity", IDENTITY)
    peers = Peers(peers_identity, token, options.get("timeout_s", 30.0), PAYLOAD_BYTES)
    source = peers.source_of(PeerAddress(host, port))
    inquiry = source.ask([record_key(peers_identity, make_block(number)) for number in range(count)], with_records=True)
    assert inquiry is not None
    assert inquiry.done.wait(WAIT_S)
    peers.close()
    numbers = []
    for number in range(count):
        key, out = record_key(IDENTITY, make_block(number)), bytearray(PAYLOAD_BYTES)
        record = inquiry.records.get(key)
        if record is not None and unpack(key, make_block(number), memoryview(record), memoryview(out)):
            assert out == payload_of(number)
            numbers.append(number)
    return numbers


def test_blocks_are_handed_over() -> None:
    with serving() as server:
        assert fetched(server.port, COUNT + 2) == list(range(COUNT))
        wait_for(lambda: server.num_sent >= COUNT)  # it counts a record when it has sent it
        assert (server.num_sent, server.num_turned_away) == (COUNT, 0)
        connection = PeerConnection(
            PeerAddress("127.0.0.1", server.port), IDENTITY, None, WAIT_S, record_bytes(PAYLOAD_BYTES)
        )
        keys = [record_key(IDENTITY, make_block(number)) for number in (7, 1, 9, 3)]
        assert connection.find(keys) == [keys[1], keys[3]]
        connection.close()


def test_a_socket_of_this_host(tmp_path: Path) -> None:
    path = tmp_path / "blocks.sock"
    with serving(kv_ip=f"unix:{path}"):
        assert path.stat().st_mode & 0o077 == 0
        assert fetched(0, COUNT, host=f"unix:{path}") == list(range(COUNT))
    assert not path.exists()
    path.write_text("not a socket")
    with pytest.raises(ConfigError, match="cannot be listened at"):
        TransferServer(make_config(kv_ip=f"unix:{path}"), IDENTITY, ExportTable(1 << 20, 1.0))
    assert path.read_text() == "not a socket"


def test_tokens_and_models_must_be_equal() -> None:
    with serving(token="secret") as server:
        assert fetched(server.port, COUNT, token="secret") == list(range(COUNT))
        for token in (None, "other"):
            assert fetched(server.port, COUNT, token=token) == []
        assert fetched(server.port, COUNT, token="secret", identity=b"b" * 16) == []
        wait_for(lambda: server.num_sent >= COUNT)
        assert server.num_sent == COUNT
    with serving() as server:
        assert fetched(server.port, COUNT, token="secret") == []


def test_a_client_without_the_token_gets_nothing_though_it_asks_on() -> None:
    with serving(token="secret") as server, socket.create_connection(("127.0.0.1", server.port), WAIT_S) as client:
        key = record_key(IDENTITY, make_block(0))[16:]
        client.sendall(GREETING.pack(b"QKVT", 1, IDENTITY, bytes(16)) + bytes(PROOF_BYTES))
        client.sendall(REQUEST.pack(READ, 1) + key)
        answer = b""
        # What it asked for is left unread, so that the end of the connection may be a reset.
        with suppress(ConnectionResetError):
            while part := client.recv(1 << 16):
                answer += part
        assert len(answer) == GREETING.size + PROOF_BYTES
        assert server.num_turned_away == 1


@pytest.mark.parametrize(
    "request_bytes", [REQUEST.pack(3, 1), REQUEST.pack(WHICH, 0), REQUEST.pack(READ, MOST_KEYS + 1), b"\xff" * 5]
)
def test_requests_out_of_bounds_end_the_connection(request_bytes: bytes) -> None:
    with serving() as server:
        connection = PeerConnection(
            PeerAddress("127.0.0.1", server.port), IDENTITY, None, WAIT_S, record_bytes(PAYLOAD_BYTES)
        )
        connection._socket.sendall(request_bytes)
        assert connection._socket.recv(1) == b""
        connection.close()
        assert fetched(server.port, COUNT) == list(range(COUNT))


def test_connections_are_bounded() -> None:
    with serving() as server:
        held = [socket.create_connection(("127.0.0.1", server.port), WAIT_S) for _ in range(MOST_CONNECTIONS)]
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as one_more:
            assert one_more.recv(1) == b""
        for connection in held:
            connection.close()


def test_a_record_longer_than_a_block_is_not_read() -> None:
    with serving() as server:
        connection = PeerConnection(PeerAddress("127.0.0.1", server.port), IDENTITY, None, WAIT_S, PAYLOAD_BYTES - 1)
        received: dict[bytes, Record] = {}
        with pytest.raises(TransferError, match="more than"):
            connection.fetch([record_key(IDENTITY, make_block(0))], received.__setitem__)
        connection.close()


def cut_at(length: int) -> Answer:
    """Pass on so many bytes of answers."""
    left = [length]

    def answer(data: bytes) -> bytes | None:
        part = data[: max(0, left[0])]
        left[0] -= len(data)
        return part or None

    return answer


def test_a_connection_that_is_cut_off_after_each_block_gives_those_before_it() -> None:
    with serving() as server:
        greeting = GREETING.size + PROOF_BYTES
        size = len(server._exports.get(record_key(IDENTITY, make_block(0))) or b"") + 4
        for number in range(COUNT + 1):
            for offset in (-1, 0, 1):
                length = greeting + number * size + offset
                with relay(server.port, lambda _, length=length: cut_at(length)) as port:  # type: ignore[misc]
                    expected = list(range(min(COUNT, number - (offset < 0)))) if number or offset >= 0 else []
                    assert fetched(port, COUNT) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_connection_that_is_cut_off_or_changed_anywhere_gives_nothing_wrong(seed: int) -> None:
    rng = random.Random(seed)

    def flips(_: int) -> Answer:
        def answer(data: bytes) -> bytes:
            changed = bytearray(data)
            for _ in range(rng.randrange(3)):
                changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
            return bytes(changed)

        return answer

    with serving() as server:
        whole = GREETING.size + PROOF_BYTES + COUNT * (PAYLOAD_BYTES + 200)
        for _ in range(15):
            with relay(server.port, lambda _: cut_at(rng.randrange(whole))) as port:
                numbers = fetched(port, COUNT)
                assert numbers == list(range(len(numbers)))
            with relay(server.port, flips) as port:
                fetched(port, COUNT, timeout_s=0.3)  # asserts that what passes the checks is right


def test_a_peer_that_hangs_or_is_gone_is_a_miss() -> None:
    with relay(0, lambda _: lambda _: b"") as port:
        assert fetched(port, COUNT, timeout_s=0.2) == []
    assert fetched(port, COUNT) == []


def test_exports_are_bounded_and_expire() -> None:
    now = [0.0]
    exports = ExportTable(5 * PAYLOAD_BYTES, 10.0, lambda: now[0])
    keys = [record_key(IDENTITY, make_block(number)) for number in range(8)]
    for number in range(8):
        exports.put(keys[number], make_block(number), payload_of(number))
        assert exports.num_bytes <= 5 * PAYLOAD_BYTES
    assert [exports.get(key) is not None for key in keys] == [False] * 4 + [True] * 4
    now[0] = 9.0
    exports.put(keys[5], make_block(5), payload_of(5))
    now[0] = 11.0
    assert [exports.get(key) is not None for key in keys] == [False] * 5 + [True] + [False] * 2
    assert len(exports) == 1
    exports.put(keys[0], make_block(0), memoryview(bytes(6 * PAYLOAD_BYTES)))
    assert exports.get(keys[0]) is None
    exports.reset()
    assert (len(exports), exports.num_bytes) == (0, 0)


def test_many_clients_at_once() -> None:
    with serving() as server:
        results: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: results.append(fetched(server.port, COUNT)), daemon=True) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert results == [list(range(COUNT))] * 8


# ---- the option ----


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("{", "kv_transfer_config must be a JSON object"),
        ("[]", "kv_transfer_config must be a JSON object"),
        ({}, "kv_transfer_config.kv_role"),
        ({"kv_role": "both"}, "kv_transfer_config.kv_role must be one of kv_producer, kv_consumer, kv_both"),
        ({"kv_role": "kv_both", "kv_connector": "NixlConnector"}, "kv_connector must be one of QuireConnector"),
        ({"kv_role": "kv_both", "kv_ip": "0.0.0.0"}, "kv_ip must be an address of this host, or a token"),
        ({"kv_role": "kv_both", "kv_port": 70000}, "kv_port must be an integer"),
        ({"kv_role": "kv_both", "kv_parallel_size": 2}, "kv_parallel_size must be one of 1"),
        ({"kv_role": "kv_both", "other": 2}, "kv_transfer_config.other must be absent"),
        ({"kv_role": "kv_both", "kv_connector_extra_config": {"x": 1}}, "kv_connector_extra_config.x must be absent"),
        ({"kv_role": "kv_both", "kv_load_failure_policy": "retry"}, "one of recompute, fail"),
        ({"kv_role": "kv_both", "kv_connector_extra_config": {"allowed_hosts": "a"}}, "allowed_hosts must be a list"),
    ],
)
def test_options_that_cannot_be_honoured(value: object, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_kv_transfer(value)
    assert name in str(refused.value)


def test_options_in_vllms_spelling() -> None:
    config = read_kv_transfer(
        '{"kv_connector": "QuireConnector", "kv_role": "kv_producer", "kv_ip": "0.0.0.0", "kv_buffer_size": 1e9,'
        ' "kv_rank": 0, "kv_parallel_size": 1, "kv_buffer_device": "cpu",'
        ' "kv_connector_extra_config": {"token": "secret", "allowed_hosts": ["10.0.0.7"]}}'
    )
    assert config is not None
    assert (config.is_producer, config.is_consumer, config.kv_buffer_size) == (True, False, 10**9)
    assert read_kv_transfer(None) is None


def test_requests_may_name_the_allowed_addresses_only() -> None:
    config = make_config(allowed_hosts=("10.0.0.7", "127.0.0.1:14579", "[::1]:14579", "unix:/run/a", "host.example:9"))
    for host, port in (("10.0.0.7", 1), ("127.0.0.1", 14579), ("::1", 14579), ("unix:/run/a", 0), ("host.example", 9)):
        assert config.refused_field(host, port) is None
    for host, port in (("127.0.0.1", 22), ("::1", 22), ("host.example", 99)):
        assert config.refused_field(host, port) == "remote_port"
    others = ("127.0.0.2", "localhost", "::2", "10.0.0.70", "unix:/run/b", "unix:/run/a/../a", "unix:", "host", "")
    for host in others:
        assert config.refused_field(host, 14579) == "remote_host"
        assert make_config().refused_field(host, 14579) == "remote_host", "nothing is allowed by default"
