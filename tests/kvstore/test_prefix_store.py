"""The durable prefix cache: what was saved is found again, also after a restart, within its bounds."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from quire.distributed.kvstore.folder import StoreFolder
from quire.errors import ConfigError
from quire.memory.results import StoredBlock
from tests.kvstore.stores import MAX_BYTES, PAYLOAD_BYTES, fetch, fill, found, make_block, open_store, payload_of


def test_what_was_saved_is_found_at_once_and_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert not store.holds(make_block(1))
    store.save(make_block(1), payload_of(1))
    store.flush()
    assert store.holds(make_block(1))
    assert fetch(store, 1) == payload_of(1)
    assert fetch(store, 2) is None
    stats = store.stats
    assert (stats.num_saved, stats.num_hits, stats.num_misses, stats.loaded_bytes) == (1, 1, 1, PAYLOAD_BYTES)
    store.close()
    again = open_store(tmp_path)
    assert again.stats.num_blocks == 1
    assert found(again, 3) == [1]
    again.close()


def test_a_block_is_written_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(2):
        store.save(make_block(1), payload_of(1))
        store.save(make_block(1), payload_of(1))
        store.flush()
    assert store.stats.num_saved == 1
    store.close()


def test_groups_are_apart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(make_block(1, group_idx=0), payload_of(1))
    store.flush()
    assert not store.holds(make_block(1, group_idx=1))
    store.close()


@pytest.mark.parametrize(
    "other",
    [
        make_block(0)._replace(tokens=b"\1" * 64),
        make_block(0)._replace(parent=bytes(16)),
        make_block(0)._replace(tokens=b""),
    ],
)
def test_a_collision_of_digests_is_a_miss(tmp_path: Path, other: StoredBlock) -> None:
    fill(tmp_path, 1)
    store = open_store(tmp_path)
    assert store.holds(other)
    assert not store.fetch(other, memoryview(bytearray(PAYLOAD_BYTES)))
    store.close()


def test_another_model_hits_nothing_and_takes_nothing_away(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    other = open_store(tmp_path, identity=b"b" * 16)
    assert (other.stats.num_blocks, other.stats.num_foreign) == (0, 3)
    assert found(other, 3) == []
    other.save(make_block(0), payload_of(7))
    other.close()
    first = open_store(tmp_path)
    assert found(first, 3) == [0, 1, 2]
    first.close()


def test_the_file_keeps_to_its_size_and_the_oldest_used_go_first(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    most = 0
    for number in range(300):
        store.save(make_block(number), payload_of(number), wait=True)
        store.flush()
        assert fetch(store, 0) == payload_of(0)
        most = max(most, store.stats.num_bytes)
    assert most <= MAX_BYTES
    assert (tmp_path / "blocks.mdb").stat().st_size <= MAX_BYTES
    stats = store.stats
    assert stats.num_deleted == 300 - stats.num_blocks
    assert (stats.num_full, stats.num_dropped) == (0, 0)
    kept = found(store, 300)
    assert kept == [0, *range(300 - len(kept) + 1, 300)]
    assert len(kept) > 50
    store.close()


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    fill(tmp_path, 40)
    store = open_store(tmp_path)
    assert fetch(store, 0) is not None
    store.close()
    store = open_store(tmp_path)
    for number in range(100, 160):
        store.save(make_block(number), payload_of(number), wait=True)
    store.flush()
    kept = found(store, 40)
    assert kept[0] == 0
    assert kept[1:] == list(range(40 - len(kept) + 1, 40))
    assert len(kept) < 40
    store.close()


def test_the_blocks_of_other_models_go_when_theirs_are_the_oldest(tmp_path: Path) -> None:
    fill(tmp_path, 40)
    other = open_store(tmp_path, identity=b"b" * 16)
    for number in range(60):
        other.save(make_block(number), payload_of(number), wait=True)
    other.flush()
    assert other.stats.num_blocks == 60
    assert 0 < other.stats.num_foreign < 40
    other.close()


def test_a_reset_forgets_what_was_saved_and_what_waits(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    store = open_store(tmp_path)
    for number in range(5, 20):
        store.save(make_block(number), payload_of(number))
    store.reset()
    assert found(store, 20) == []
    store.save(make_block(3), payload_of(3))
    store.flush()
    assert found(store, 20) == [3]
    store.close()
    again = open_store(tmp_path)
    assert found(again, 20) == [3]
    assert again.stats.num_bytes < 2 * PAYLOAD_BYTES
    again.close()


def test_a_folder_is_one_engines_of_a_process(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ConfigError, match="in use by another engine of this process") as refused:
        open_store(tmp_path)
    assert refused.value.field == "prefix_cache_dir"
    store.save(make_block(1), payload_of(1))
    store.flush()
    assert found(store, 2) == [1]
    store.close()
    open_store(tmp_path).close()


def test_the_key_is_drawn_once_and_only_its_owner_can_read_the_folder(tmp_path: Path) -> None:
    first = StoreFolder(tmp_path / "made" / "deep")
    key = first.key
    first.close()
    again = StoreFolder(tmp_path / "made" / "deep")
    assert again.key == key
    again.close()
    other = StoreFolder(tmp_path / "other")
    assert other.key != key
    other.close()
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "other" / "key").stat().st_mode) == 0o600
    open_store(tmp_path / "other").close()
    assert stat.S_IMODE((tmp_path / "other" / "blocks.mdb").stat().st_mode) == 0o600


def test_too_few_bytes_are_refused_with_the_least_that_would_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_cache_disk_bytes must be at least") as refused:
        open_store(tmp_path, max_bytes=100_000)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    store = open_store(tmp_path / "enough", max_bytes=least)
    for number in range(200):
        store.save(make_block(number), payload_of(number), wait=True)
    store.flush()
    assert store.stats.num_full == 0
    assert fetch(store, 199) == payload_of(199)
    store.close()
