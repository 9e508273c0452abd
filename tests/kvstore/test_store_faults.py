"""What goes wrong on disk is a miss and a counter: never a wrong byte, never a crash."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.distributed.kvstore.folder import StoreFolder
from quire.distributed.kvstore.record import pack, record_key, seal, unpack
from quire.errors import ConfigError
from tests.kvstore.descriptors import free_descriptors
from tests.kvstore.stores import MAX_BYTES, PAYLOAD_BYTES, fetch, fill, found, make_block, open_store, payload_of


def test_a_flipped_byte_anywhere_in_a_record_is_found() -> None:
    block, payload = make_block(3), memoryview(bytes(range(250)))
    key = record_key(b"a" * 16, block)
    record = pack(block, payload)
    seal(key, record)
    out = bytearray(250)
    assert unpack(key, block, memoryview(record), memoryview(out))
    assert out == payload
    for place in range(len(record)):
        for flip in (1, 0x80, 0xFF):
            record[place] ^= flip
            assert not unpack(key, block, memoryview(record), memoryview(out))
            record[place] ^= flip
    for length in range(len(record)):
        assert not unpack(key, block, memoryview(record)[:length], memoryview(out))
    assert not unpack(b"b" + key[1:], block, memoryview(record), memoryview(out))


def test_a_block_whose_bytes_changed_on_disk_is_a_miss_and_deleted(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    file = tmp_path / "blocks.mdb"
    data = bytearray(file.read_bytes())
    place = data.index(bytes(payload_of(3))) + 1234
    data[place] ^= 1
    file.write_bytes(data)
    store = open_store(tmp_path)
    assert store.stats.num_damaged == 0
    assert found(store, 5) == [0, 1, 2, 4]
    assert store.stats.num_damaged == 1
    assert not store.holds(make_block(3))
    store.save(make_block(3), payload_of(3))
    store.flush()
    assert found(store, 5) == [0, 1, 2, 3, 4]
    store.close()


def test_flipped_bytes_anywhere_in_the_file_never_give_wrong_bytes(tmp_path: Path) -> None:
    """Each damage by itself, structure and payload alike; a page of LMDB has 4096 bytes."""
    fill(tmp_path, 6)
    file = tmp_path / "blocks.mdb"
    whole = file.read_bytes()
    rng = random.Random(3)
    # The beginnings of pages are their structure: all of these, and some places in between.
    places = [page + offset for page in range(0, len(whole), 4096) for offset in range(0, 48, 5)]
    num_damaged = 0
    for place in rng.sample(places, 60) + [rng.randrange(len(whole)) for _ in range(40)]:
        data = bytearray(whole)
        data[place] ^= rng.randrange(1, 256)
        file.write_bytes(data)
        store = open_store(tmp_path)
        kept = found(store, 6)
        assert len(kept) == 6 or store.stats.num_damaged + store.stats.num_misses
        store.save(make_block(9), payload_of(9))
        store.flush()
        assert fetch(store, 9) == payload_of(9)
        num_damaged += bool(store.stats.num_damaged)
        store.close()
    assert num_damaged > 20


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95])
def test_a_file_that_was_cut_off_is_set_aside(tmp_path: Path, share: float) -> None:
    fill(tmp_path, 20)
    file = tmp_path / "blocks.mdb"
    os.truncate(file, int(file.stat().st_size * share))
    store = open_store(tmp_path)
    assert store.stats.num_damaged == 1
    assert (tmp_path / "blocks.mdb.damaged").exists()
    assert found(store, 20) == []
    store.save(make_block(1), payload_of(1))
    store.close()
    again = open_store(tmp_path)
    assert again.stats.num_damaged == 0
    assert found(again, 20) == [1]
    again.close()


def test_a_file_that_is_cut_off_while_it_is_used_is_used_no_more(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    store = open_store(tmp_path)
    os.truncate(tmp_path / "blocks.mdb", 8192)
    assert found(store, 20) == []
    assert store.stats.num_damaged == 1
    assert not store.holds(make_block(1))
    store.save(make_block(30), payload_of(30), wait=True)
    store.flush()
    store.reset()
    store.close()
    again = open_store(tmp_path)
    assert again.stats.num_damaged == 1
    again.close()


def test_something_else_in_the_files_place_is_set_aside(tmp_path: Path) -> None:
    tmp_path.joinpath("blocks.mdb").write_text("no database\n" * 1000)
    store = open_store(tmp_path)
    assert store.stats.num_damaged == 1
    store.close()


def test_a_damaged_key_begins_the_cache_anew(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "key").write_bytes(b"short")
    folder = StoreFolder(tmp_path)
    assert len(folder.key) == 32
    folder.close()
    again = StoreFolder(tmp_path)
    assert again.key == folder.key
    again.close()


def test_a_file_above_a_lowered_limit_begins_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=4 << 20)
    for number in range(120):
        store.save(make_block(number), payload_of(number), wait=True)
    store.close()
    assert (tmp_path / "blocks.mdb").stat().st_size > MAX_BYTES
    store = open_store(tmp_path)
    assert (found(store, 120), store.stats.num_damaged) == ([], 0)
    store.close()


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Have the system refuse to let any file grow further: what a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_counter_and_the_rest_is_still_found(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    store = open_store(tmp_path)
    with files_of_at_most((tmp_path / "blocks.mdb").stat().st_size + 100_000):
        for number in range(20, 60):
            store.save(make_block(number), payload_of(number), wait=True)
            store.flush()
        kept = found(store, 60)
        stats = store.stats
        assert stats.num_full > 0
        assert len(kept) >= 15
        # Older ones made room for newer ones, in the pages that there are.
        assert max(kept) > 20
    for number in range(60, 70):
        store.save(make_block(number), payload_of(number), wait=True)
    store.flush()
    assert found(store, 70)[-10:] == list(range(60, 70))
    store.close()


def test_where_nothing_can_be_written_nothing_is_lost(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    store = open_store(tmp_path)
    with files_of_at_most(4096):
        for number in range(20, 60):
            store.save(make_block(number), payload_of(number), wait=True)
            store.flush()
        assert store.stats.num_full > 0
        # What could not be deleted is hidden once, and no more than an eighth.
        assert len(found(store, 60)) >= 10
    store.close()
    again = open_store(tmp_path)
    assert again.stats.num_damaged == 0
    assert len(found(again, 20)) >= 10
    again.close()


WRITER = """
import sys
from pathlib import Path
from tests.kvstore.stores import make_block, open_store, payload_of
store = open_store(Path(sys.argv[1]))
print("ready", flush=True)
number = 0
while True:
    store.save(make_block(number % 200), payload_of(number % 200), wait=True)
    number += 1
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.3])
def test_a_process_killed_while_it_writes_leaves_a_sound_file(tmp_path: Path, wait_s: float) -> None:
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(wait_s)
            process.send_signal(signal.SIGKILL)
        store = open_store(tmp_path)
        assert store.stats.num_damaged == 0
        assert len(found(store, 200)) == store.stats.num_blocks
        store.close()


@pytest.mark.parametrize("where", ["file", "file/inside", "/proc/quire"])
def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="prefix_cache_dir must be a folder that can be written") as refused:
        StoreFolder(tmp_path / where)
    assert refused.value.field == "prefix_cache_dir"


@pytest.mark.skipif(os.geteuid() == 0, reason="whoever is root may write anywhere")
def test_a_folder_that_may_only_be_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="can be written"):
        StoreFolder(tmp_path)


def test_a_lack_of_descriptors_is_no_damage(tmp_path: Path) -> None:
    """With none left, one, two, ...: each file that is opened at the start in turn cannot be; nothing is set aside."""
    fill(tmp_path, 5)
    errors: list[ConfigError] = []
    for num_free in range(12):
        with free_descriptors(num_free):
            try:
                store = open_store(tmp_path)
            except ConfigError as error:
                errors.append(error)
                continue
        assert (found(store, 5), store.stats.num_damaged) == ([0, 1, 2, 3, 4], 0)
        store.close()
    assert 5 < len(errors) < 12
    assert {error.field for error in errors} == {"prefix_cache_dir"}
    assert all("Too many open files" in str(error) for error in errors)
    assert not (tmp_path / "blocks.mdb.damaged").exists()


def test_too_much_at_once_is_dropped_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.distributed.kvstore.write_queue.MOST_PENDING_BYTES", 3 * PAYLOAD_BYTES)
    store = open_store(tmp_path)
    with store.queue.changed:  # the writer cannot take anything meanwhile
        for number in range(10):
            store.save(make_block(number), payload_of(number))
    store.flush()
    assert store.stats.num_dropped == 8
    assert found(store, 10) == [0, 1]
    assert store.stats.num_bytes < MAX_BYTES
    store.close()
