"""Records for other engines that are made behind the engine's back: who asks waits, and nothing is kept for ever."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.record import record_key, unpack
from tests.kvstore.stores import PAYLOAD_BYTES, make_block, payload_of
from tests.kvstore.test_disk_blocks import LateBytes

IDENTITY = b"a" * 16
KEYS = [record_key(IDENTITY, make_block(number)) for number in range(8)]
WAIT_S = 60.0


@pytest.fixture
def exports() -> Iterator[ExportTable]:
    table = ExportTable(1 << 20, 1000.0)
    yield table
    table.close()


def arriving(exports: ExportTable, number: int, **options: bool) -> LateBytes:
    """Put a block whose bytes are there later."""
    data = LateBytes(number, **options)
    exports.put(KEYS[number], make_block(number), data.begin, PAYLOAD_BYTES)
    return data


def is_whole(record: bytearray | None, number: int) -> bool:
    """Return whether a record is that of a block."""
    out = bytearray(PAYLOAD_BYTES)
    if record is None or not unpack(KEYS[number], make_block(number), memoryview(record), memoryview(out)):
        return False
    return bytes(out) == bytes(payload_of(number))


def test_who_asks_waits_for_the_bytes(exports: ExportTable) -> None:
    late = arriving(exports, 0, waits=True)
    exports.put(KEYS[1], make_block(1), payload_of(1))
    assert KEYS[0] in exports
    num_bytes = exports.num_bytes
    found: list[bytearray | None] = []
    asking = threading.Thread(target=lambda: found.append(exports.get(KEYS[0])), daemon=True)
    asking.start()
    assert not found
    late.arrive()
    asking.join(WAIT_S)
    assert is_whole(found[0], 0)
    assert is_whole(exports.get(KEYS[1]), 1)
    assert exports.num_bytes == num_bytes == sum(len(exports.get(key) or b"") for key in KEYS)


def test_the_bytes_of_a_cache_are_those_of_their_turn(exports: ExportTable) -> None:
    payload = bytearray(payload_of(0))
    exports.put(KEYS[0], make_block(0), memoryview(payload))
    payload[:] = bytes(len(payload))
    assert is_whole(exports.get(KEYS[0]), 0)


def test_a_device_that_fails_costs_its_block_only(exports: ExportTable, caplog: pytest.LogCaptureFixture) -> None:
    arriving(exports, 0, fails=True)
    arriving(exports, 1)
    assert is_whole(exports.get(KEYS[1]), 1)
    assert exports.get(KEYS[0]) is None
    assert KEYS[0] not in exports
    assert "a block for other engines is lost: the device is lost" in caplog.text
    assert len(exports) == 1
    # It can be given again.
    arriving(exports, 0)
    assert is_whole(exports.get(KEYS[0]), 0)


@pytest.mark.parametrize("ends", ["reset", "close", "evict"])
def test_who_waits_for_what_is_dropped_gets_nothing(ends: str) -> None:
    exports = ExportTable(2 * PAYLOAD_BYTES, 1000.0)
    late = arriving(exports, 0, waits=True)
    found: list[bytearray | None] = []
    asking = threading.Thread(target=lambda: found.append(exports.get(KEYS[0])), daemon=True)
    asking.start()
    if ends == "evict":
        for number in (1, 2):
            exports.put(KEYS[number], make_block(number), payload_of(number))
    elif ends == "reset":
        exports.reset()
    else:
        closing = threading.Thread(target=exports.close, daemon=True)
        closing.start()
    asking.join(WAIT_S)
    assert found == [None]
    late.arrive()
    exports.close()
    assert (len(exports), exports.num_bytes) == (0, 0)
    exports.put(KEYS[3], make_block(3), payload_of(3))
    assert exports.get(KEYS[3]) is None


def test_a_record_without_memory_costs_itself_only(
    exports: ExportTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> bytearray:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr("quire.distributed.kvstore.exports.pack", fails)
    for number in range(2):
        arriving(exports, number)
    assert is_whole(exports.get(KEYS[1]), 1)
    assert exports.get(KEYS[0]) is None
    assert "a block for other engines is lost: no memory" in caplog.text


def test_bytes_of_a_dropped_record_are_not_kept_for_its_turn(exports: ExportTable) -> None:
    first = arriving(exports, 0, waits=True)
    second = weakref.ref(arriving(exports, 1))
    exports.put(KEYS[2], make_block(2), payload_of(2))
    exports._max_bytes = exports.num_bytes
    assert second() is not None
    for number in (3, 4):
        exports.put(KEYS[number], make_block(number), payload_of(number))
    assert second() is None
    first.arrive()
    assert [is_whole(exports.get(KEYS[number]), number) for number in range(5)] == [False, False, True, True, True]


def test_a_block_that_is_put_again_is_made_once(exports: ExportTable) -> None:
    late = arriving(exports, 0, waits=True)
    again = arriving(exports, 0)
    late.arrive()
    assert is_whole(exports.get(KEYS[0]), 0)
    assert (late.num_waits, again.num_waits, len(exports)) == (1, 0, 1)
