"""Blocks whose bytes arrive from a device while steps go on: each is written once it is there, and none is torn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.distributed.kvstore.disk_blocks import DiskBlocks
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.prefix_store import PrefixStore
from quire.distributed.kvstore.record import record_key, unpack
from tests.kvstore.stores import PAYLOAD_BYTES, found, make_block, open_store, payload_of

IDENTITY = b"a" * 16


class LateBytes:
    """Bytes that arrive when a test says so, or when somebody waits for them.

    Args:
        number: number of the block.
        fails: the device fails meanwhile.
        waits: whoever waits does so until `arrive` is called.
    """

    def __init__(self, number: int, *, fails: bool = False, waits: bool = False) -> None:
        self._number, self._fails = number, fails
        self._arrived = threading.Event()
        self.is_ready, self.num_waits = False, 0
        if not waits:
            self._arrived.set()

    def begin(self) -> LateBytes:
        """Begin to fetch them."""
        return self

    def arrive(self) -> None:
        """Have them arrive."""
        self._arrived.set()

    def wait(self) -> Tensor:
        self.num_waits += 1
        assert self._arrived.wait(60.0)
        if self._fails:
            raise RuntimeError("the device is lost")
        self.is_ready = True
        return row_of(self._number)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PrefixStore]:
    store = open_store(tmp_path, IDENTITY)
    yield store
    store.close()


@pytest.fixture
def disk(store: PrefixStore) -> DiskBlocks:
    return DiskBlocks(b"k" * 32, IDENTITY, [PAYLOAD_BYTES], disk=store, exports=ExportTable(1 << 20, 60.0))


def row_of(number: int) -> Tensor:
    """Return the bytes of a block, in memory that may be written over."""
    return torch.frombuffer(bytearray(payload_of(number)), dtype=torch.uint8)


def save(disk: DiskBlocks, count: int, *, wait: bool = False) -> list[LateBytes]:
    """Save the first blocks, whose bytes are still to come."""
    late = [LateBytes(number) for number in range(count)]
    for number, data in enumerate(late):
        disk.save(make_block(number), data.begin, wait=wait)
    return late


def test_blocks_are_written_in_turn_once_their_bytes_have_arrived(disk: DiskBlocks, store: PrefixStore) -> None:
    late = save(disk, 4)
    disk.save_arrived()
    store.flush()
    assert found(store, 4) == []
    # The third is there too; it has its turn behind the second.
    for number in (0, 2):
        late[number].is_ready = True
    disk.save_arrived()
    store.flush()
    assert found(store, 4) == [0]
    late[1].is_ready = True
    disk.save(make_block(4), LateBytes(4).begin)
    store.flush()
    assert found(store, 5) == [0, 1, 2]
    assert [data.num_waits for data in late] == [1, 1, 1, 0]


def test_who_asks_to_wait_waits_for_all(disk: DiskBlocks, store: PrefixStore) -> None:
    save(disk, 3)
    disk.touch([make_block(0)])
    assert found(store, 3) == [0, 1, 2]
    save(disk, 4)
    disk.close()
    again = open_store(store._folder.path, IDENTITY)
    assert found(again, 4) == [0, 1, 2, 3]
    again.close()


def test_a_save_that_may_wait_is_not_put_off(disk: DiskBlocks, store: PrefixStore) -> None:
    assert [data.num_waits for data in save(disk, 2, wait=True)] == [1, 1]
    # What is written through does not wait, though movements are asked to.
    with disk.copying_out(None):
        assert [data.num_waits for data in save(disk, 4, wait=True)] == [0] * 4
    store.flush()
    assert found(store, 4) == [0, 1]


def test_a_row_of_the_host_is_saved_before_it_is_written_over(disk: DiskBlocks, store: PrefixStore) -> None:
    late = save(disk, 1)
    row = row_of(1)
    with disk.copying_out(None):
        disk.save(make_block(1), row, wait=True)
    row.zero_()
    late[0].is_ready = True
    disk.save_arrived()
    store.flush()
    assert found(store, 2) == [0, 1]


def test_no_more_bytes_are_on_their_way_than_the_limit(
    disk: DiskBlocks, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.distributed.kvstore.disk_blocks.MOST_ARRIVING_BYTES", 2 * PAYLOAD_BYTES)
    begun: list[int] = []

    def saved_later(number: int) -> LateBytes:
        late = LateBytes(number)

        def begin() -> LateBytes:
            begun.append(number)
            return late

        disk.save(make_block(number), begin)
        return late

    late = [saved_later(number) for number in range(3)]
    assert (begun, store.stats.num_dropped) == ([0, 1], 1)
    late[0].is_ready = True
    saved_later(3)
    assert (begun, store.stats.num_dropped) == ([0, 1, 3], 1)
    disk.save_arrived(wait=True)
    for number in (4, 5):
        saved_later(number)
    disk.reset()
    saved_later(2)
    disk.save_arrived(wait=True)
    store.flush()
    assert (begun, found(store, 6)) == ([0, 1, 3, 4, 5, 2], [2])


def test_an_export_is_put_off_and_written_nowhere(disk: DiskBlocks, store: PrefixStore) -> None:
    keys = [record_key(IDENTITY, make_block(number)) for number in range(4)]
    late = LateBytes(0, waits=True)
    with disk.copying_out(keys[:2]):
        disk.save(make_block(0), late.begin, wait=True)
        row = row_of(1)
        disk.save(make_block(1), row, wait=True)
        row.zero_()
        others = LateBytes(2)
        disk.save(make_block(2), others.begin, wait=True)  # is not asked for
    exports = disk.exports
    assert exports is not None
    assert [key in exports for key in keys] == [True, True, False, False]
    late.arrive()
    for number in range(2):
        record, out = exports.get(keys[number]), bytearray(PAYLOAD_BYTES)
        assert record is not None
        assert unpack(keys[number], make_block(number), memoryview(record), memoryview(out))
        assert out == payload_of(number)
    store.flush()
    assert found(store, 4) == []


def test_a_reset_forgets_what_was_to_come(disk: DiskBlocks, store: PrefixStore) -> None:
    late = save(disk, 2)
    disk.reset()
    for data in late:
        data.is_ready = True
    disk.save_arrived()
    store.flush()
    assert found(store, 2) == []
    assert [data.num_waits for data in late] == [0, 0]


def test_a_device_that_fails_costs_what_was_to_come_from_it_and_nothing_else(
    disk: DiskBlocks, store: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(disk, 1)[0].is_ready = True
    disk.save(make_block(1), LateBytes(1, fails=True).begin)
    disk.save(make_block(2), LateBytes(2).begin)
    disk.save_arrived(wait=True)
    assert "2 blocks are not saved: the device is lost" in caplog.text
    store.flush()
    assert found(store, 3) == [0]
