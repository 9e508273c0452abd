"""The remote prefix cache against a real server, and against a store that misbehaves: a miss, never a wrong byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from quire.config.stores import client_url, shown_url
from quire.distributed.kvstore.record import record_key, unpack
from quire.distributed.kvstore.remote_store import RemoteSettings, RemoteStore, name_of
from quire.distributed.kvstore.sources import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_FAILURES,
    CircuitBreaker,
    Inquiry,
)
from quire.errors import ConfigError
from tests.kvstore.servers import Answer, Server, free_port, relay, server
from tests.kvstore.stores import PAYLOAD_BYTES, make_block, payload_of

IDENTITY = b"a" * 16
WAIT_S = 60.0


def open_remote(
    url: str, timeout_s: float = 30.0, ttl_s: float | None = 600.0, identity: bytes = IDENTITY
) -> RemoteStore:
    return RemoteStore(RemoteSettings(url, timeout_s, ttl_s), identity, PAYLOAD_BYTES)


def save(store: RemoteStore, *numbers: int) -> None:
    for number in numbers:
        store.save(make_block(number), payload_of(number))
    assert store.flush(WAIT_S)


def answer_of(store: RemoteStore, count: int, *, with_records: bool) -> Inquiry | None:
    """Return the whole answer about the first blocks; None where the store is not asked."""
    keys = [record_key(store._identity, make_block(number)) for number in range(count)]
    inquiry = store.pool.ask(keys, with_records=with_records)
    if inquiry is not None:
        assert inquiry.done.wait(WAIT_S)
        store.pool.end(inquiry, 0.0)
    return inquiry


def found(store: RemoteStore, count: int) -> list[int]:
    """Return which of the first blocks are found and pass the checks; what passes must be right."""
    inquiry = answer_of(store, count, with_records=True)
    numbers = []
    for number in range(count):
        key, out = record_key(IDENTITY, make_block(number)), bytearray(PAYLOAD_BYTES)
        record = None if inquiry is None else inquiry.records.get(key)
        if record is not None and unpack(key, make_block(number), memoryview(record), memoryview(out)):
            assert out == payload_of(number)
            numbers.append(number)
    return numbers


# ---- a real server ----


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Server]:
    with server(tmp_path) as running:
        yield running


@pytest.mark.slow
def test_what_one_engine_saves_another_finds(real: Server) -> None:
    one, other = open_remote(real.url), open_remote(real.url)
    save(one, 0, 1, 3)
    which = answer_of(other, 5, with_records=False)
    assert which is not None
    assert list(which.records) == [record_key(IDENTITY, make_block(number)) for number in (0, 1, 3)]
    assert found(other, 5) == [0, 1, 3]
    # It is written once, whoever saves it.
    save(other, 0, 4)
    assert (one.stats.num_saved, other.stats.num_saved) == (3, 1)
    another_model = open_remote(real.url, identity=b"b" * 16)
    assert found(another_model, 5) == []
    assert len(real.client().keys("quire:kv:*")) == 4
    for store in (one, other, another_model):
        assert store.stats.num_failures == 0
        store.close()


@pytest.mark.slow
def test_records_live_as_long_as_they_are_used(real: Server) -> None:
    store = open_remote(real.url, ttl_s=1000.0)
    save(store, 0, 1)
    client = real.client()
    names = sorted(client.keys("*"))
    for name in names:
        assert 0 < client.pttl(name) <= 1_000_000
        client.pexpire(name, 500_000)
    assert found(store, 1) == [0]
    store.reset()  # wakes the writer, which writes uses before anything else
    client.pexpire(names[1], 1)
    store.flush(WAIT_S)
    assert found(store, 2) == []
    save(store, 0, 1)
    assert found(store, 2) == [0, 1]
    client.delete(*client.keys("*"))
    # An answer that lacks a block is how an engine learns that it must be written again.
    assert found(store, 2) == []
    save(store, 0)
    assert found(store, 2) == [0]
    store.close()
    lasting = open_remote(real.url, ttl_s=None)
    save(lasting, 7)
    assert -1 in map(client.pttl, client.keys("*"))
    lasting.close()


@pytest.mark.slow
def test_a_reset_deletes_the_blocks_of_this_model_for_all(real: Server) -> None:
    one, other = open_remote(real.url), open_remote(real.url, identity=b"b" * 16)
    save(one, *range(50))
    save(other, 1)
    one.reset()
    assert found(one, 5) == []
    assert one.flush(WAIT_S)
    save(one, 3)
    assert found(one, 50) == [3]
    assert len(real.client().keys("*")) == 2
    one.close()
    other.close()


@pytest.mark.slow
def test_damaged_and_foreign_values_are_misses(real: Server) -> None:
    store = open_remote(real.url)
    save(store, *range(6))
    client = real.client()
    names = {number: name_of(record_key(IDENTITY, make_block(number))) for number in range(6)}
    value = bytearray(client.get(names[0]))
    value[len(value) // 2] ^= 1
    client.set(names[0], bytes(value))
    client.set(names[1], client.get(names[2]))
    client.set(names[3], b"x" * 10_000_000)
    client.delete(names[4])
    client.lpush(names[4], "of another type")
    assert found(store, 3) == [2]
    longest = answer_of(store, 4, with_records=True)
    assert longest is not None
    assert max(map(len, longest.records.values())) < PAYLOAD_BYTES + 100_000
    assert found(store, 6) == []  # one command of the round fails
    assert store.stats.num_failures == 1
    client.delete(names[4])
    assert found(store, 6) == [2, 5]
    store.close()


@pytest.mark.slow
def test_a_password_is_needed_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    with server(tmp_path, "--requirepass", "secret") as running:
        for url in (running.url, f"redis://:wrong@127.0.0.1:{running.port}/0"):
            with pytest.raises(ConfigError, match="refuses the user or the password") as refused:
                open_remote(url)
            assert refused.value.field == "prefix_cache_url"
        store = open_remote(f"valkey://:secret@127.0.0.1:{running.port}/1")
        save(store, 1)
        assert found(store, 2) == [1]
        store.close()


@pytest.mark.slow
def test_a_server_without_room_costs_blocks(tmp_path: Path) -> None:
    with server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as running:
        store = open_remote(running.url)
        for number in range(400):
            store.save(make_block(number), payload_of(number))
        assert store.flush(WAIT_S)
        assert store.stats.num_dropped > 0
        store.close()
    with server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as running:
        store = open_remote(running.url)
        for number in range(400):
            save(store, number)
        assert store.stats.num_dropped == 0
        assert 0 < len(found(store, 400)) < 400
        store.close()


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    with server(tmp_path) as first:
        port = first.port
        store = open_remote(first.url)
        save(store, 0, 1)
        assert found(store, 2) == [0, 1]
    for _ in range(MOST_FAILURES + 1):
        assert found(store, 2) == []
    assert store.stats.num_failures > 0
    save(store, 2)
    assert store.stats.num_dropped == 1
    with server(tmp_path, port=port):
        deadline = monotonic() + WAIT_S
        while not answer_of(store, 2, with_records=False) and monotonic() < deadline:
            pass
        while store.stats.is_open and monotonic() < deadline:
            pass
        save(store, 3)
        assert found(store, 4)[-1:] == [3]
        store.close()


# ---- a store that misbehaves ----


def pong(_: int) -> Answer:
    """Answer every command with PONG: the client's greeting goes well, and nothing else does."""
    return lambda _: b"+PONG\r\n"


def silence(_: int) -> Answer:
    return lambda _: b""


def test_a_dead_store_is_no_error_at_the_start() -> None:
    store = open_remote(f"redis://127.0.0.1:{free_port()}/0", timeout_s=5.0)
    assert found(store, 2) == []
    save(store, 1)
    assert store.stats.num_dropped + store.stats.num_failures >= 1
    store.close()
    store.close()


def test_a_store_that_hangs_is_left_alone_after_some_time() -> None:
    with relay(0, silence) as port:
        store = open_remote(f"redis://127.0.0.1:{port}/0", timeout_s=0.1)
        for _ in range(MOST_FAILURES):
            assert found(store, 2) == []
        assert store.stats.is_open
        num_failures = store.stats.num_failures
        assert answer_of(store, 2, with_records=False) is None
        assert store.stats.num_refused >= 1
        store.save(make_block(1), payload_of(1))
        assert store.stats.num_dropped == 1
        assert store.stats.num_failures == num_failures
        store.close()


def test_an_answer_that_never_ends_is_cut_off() -> None:
    """Each byte comes in time, and the last never does."""

    def drip(_: int) -> Answer:
        sent = iter([b"+PONG\r\n", b"$999999999\r\n"])
        return lambda _: next(sent, b"x")

    def flood(port: int, change_to: list[RemoteStore]) -> None:
        store = open_remote(f"redis://127.0.0.1:{port}/0", timeout_s=0.2)
        change_to.append(store)
        inquiry = store.pool.ask([record_key(IDENTITY, make_block(0))], with_records=True)
        if inquiry is not None:
            inquiry.done.wait(0.3)
            store.pool.abandon(inquiry)
            assert inquiry.done.wait(WAIT_S)
            assert not inquiry.records

    stores: list[RemoteStore] = []
    with relay(0, drip) as port:
        flood(port, stores)
    stores[0].close()


@pytest.mark.parametrize(
    "answer",
    [b"", b"-ERR no\r\n", b"$-1\r\n", b":1\r\n", b"*1\r\n", b"$5\r\nabcdefgh", b"\x00\xff" * 9, b"%1\r\n", b"*-5\r\n"],
)
def test_other_answers_than_expected_are_misses(answer: bytes) -> None:
    def change(_: int) -> Answer:
        sent = iter([b"+PONG\r\n"])
        return lambda _: next(sent, answer or None)

    with relay(0, change) as port:
        store = open_remote(f"redis://127.0.0.1:{port}/0", timeout_s=0.2)
        assert found(store, 2) == []
        assert found(store, 1) == []
        store.close()


@pytest.mark.slow
def test_an_answer_cut_off_at_any_byte_is_a_miss(real: Server) -> None:
    """Every length of the first 200 bytes and some of the rest; blocks that have come whole are used."""
    writer = open_remote(real.url)
    save(writer, 0, 1)
    writer.close()
    whole = 2 * PAYLOAD_BYTES
    for length in [*range(0, 200, 3), *range(200, whole + 400, 1777)]:
        left = [length]

        def change(number: int, left: list[int] = left) -> Answer:
            def answer(data: bytes) -> bytes | None:
                if number == 0:  # the greeting
                    return data
                part, left[0] = data[: left[0]], left[0] - len(data)
                return part or None

            return answer

        with relay(real.port, change) as port:
            store = open_remote(f"redis://127.0.0.1:{port}/0")
            assert found(store, 2) in ([], [0], [0, 1])
            store.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_of_answers_are_misses(real: Server, seed: int) -> None:
    import random

    rng = random.Random(seed)
    writer = open_remote(real.url)
    save(writer, *range(8))
    writer.close()

    def change(number: int) -> Answer:
        def answer(data: bytes) -> bytes:
            if number == 0 or len(data) < 40:
                return data
            changed = bytearray(data)
            for _ in range(3):
                changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
            return bytes(changed)

        return answer

    with relay(real.port, change) as port:
        store = open_remote(f"redis://127.0.0.1:{port}/0", timeout_s=1.0)
        for _ in range(8):
            found(store, 8)  # asserts that what passes the checks is right
        store.close()


# ---- addresses, and the circuit breaker ----


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:6379", "http://host:1", "redis://", "redis://host:99999", "redis://host/name", "unix://", "redis://["],
)
def test_addresses_of_another_form_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="prefix_cache_url must be redis://") as refused:
        client_url(url)
    assert refused.value.field == "prefix_cache_url"


def test_passwords_are_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        client_url("redis://user:hunter2@host/name?password=hunter2")
    assert "hunter2" not in str(refused.value)
    assert shown_url("redis://u:p@host:1/0") == "redis://***@host:1/0"
    assert client_url("valkeys://host:6380/3") == "rediss://host:6380/3"
    assert client_url("unix:///run/valkey.sock") == "unix:///run/valkey.sock"


def test_the_circuit_opens_after_failures_and_lets_one_through_after_each_pause() -> None:
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(MOST_FAILURES):
        assert breaker.allows()
        breaker.failed()
    assert breaker.is_open
    assert not breaker.allows()
    pause_s = FIRST_PAUSE_S
    for _ in range(10):
        now[0] += pause_s
        assert not breaker.is_open
        assert breaker.allows()
        assert not breaker.allows()
        breaker.failed()
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        assert breaker.is_open
    now[0] += LONGEST_PAUSE_S
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.allows()
