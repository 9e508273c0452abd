"""One folder, several processes: each finds what another stored, and the end of one costs the others nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.distributed.kvstore.folder import StoreFolder
from quire.errors import ConfigError
from tests.kvstore.stores import MAX_BYTES, fetch, fill, found, make_block, open_store, payload_of

# Commands by lines: "save N M" saves blocks and answers once they are written; "find N" answers with those that are
# found among the first; "touch N", "reset", "close". "write SEED" writes random blocks for ever, a line for each.
CHILD = """
import random, sys
from pathlib import Path
from tests.kvstore.stores import fetch, found, make_block, open_store, payload_of
store = open_store(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    name, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    if name == "save":
        for number in range(*numbers):
            store.save(make_block(number), payload_of(number), wait=True)
        store.flush()
        print("saved", flush=True)
    elif name == "find":
        print(*found(store, *numbers), flush=True)
    elif name == "reset":
        store.reset()
        store.flush()
        print("reset", flush=True)
    elif name == "stats":
        print(store.stats.num_full, store.stats.num_damaged, store.stats.num_dropped, flush=True)
    elif name == "write":
        rng = random.Random(*numbers)
        while True:
            number = rng.randrange(200)
            store.save(make_block(number), payload_of(number), wait=True)
            found(store, 3)
            if rng.random() < 0.2:
                store.flush()
            print(number, flush=True)
    else:
        break
store.close()
print("closed", flush=True)
"""

HOLDER = """
import sys
from pathlib import Path
from quire.distributed.kvstore.folder import StoreFolder
folder = StoreFolder(Path(sys.argv[1]))
folder.opened()
with folder.writing(10) as is_locked:
    print("locked" if is_locked else "late", flush=True)
    sys.stdin.readline()
"""

READER = """
import lmdb, sys
env = lmdb.open(sys.argv[1] + "/blocks.mdb", subdir=False, map_size=int(sys.argv[2]), max_dbs=5)
with env.begin() as txn:
    print("reading", flush=True)
    sys.stdin.readline()
"""


class Child:
    """Another process that uses a folder.

    Args:
        folder: the folder.
        program: its program.
    """

    def __init__(self, folder: Path, program: str = CHILD) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder), str(MAX_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self.read()

    def read(self) -> str:
        """Return the next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, line: str) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> str:
        """Return the answer to a command."""
        self.send(line)
        return self.read()

    def kill(self) -> None:
        """Kill it, wherever it is."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)


@contextmanager
def children(folder: Path, count: int, program: str = CHILD) -> Iterator[list[Child]]:
    """Start other processes on a folder, and end them."""
    started: list[Child] = []
    try:
        started += (Child(folder, program) for _ in range(count))
        yield started
    finally:
        for child in started:
            child.kill()
            for pipe in (child.process.stdin, child.process.stdout):
                assert pipe is not None
                pipe.close()


def test_a_block_of_another_process_is_found_without_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with children(tmp_path, 1) as (child,):
        assert child.first == "ready"
        assert found(store, 3) == []
        assert child.ask("save 0 2") == "saved"
        assert found(store, 3) == [0, 1]
        store.save(make_block(2), payload_of(2))
        store.flush()
        assert child.ask("find 3") == "0 1 2"
        # What one has, the other does not write again.
        store.save(make_block(1), payload_of(1))
        store.flush()
        assert store.stats.num_saved == 1
        assert store.stats.num_blocks == 3
        # The folder stays in use when the one that came first leaves.
        store.close()
        assert child.ask("save 5 6") == "saved"
        again = open_store(tmp_path)
        assert found(again, 6) == [0, 1, 2, 5]
        again.close()


def test_a_reset_is_one_for_all(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with children(tmp_path, 1) as (child,):
        child.ask("save 0 9")
        store.reset()
        assert found(store, 9) == []
        store.flush()
        assert child.ask("find 9") == ""
        child.ask("save 4 5")
        assert found(store, 9) == [4]
    store.close()


def test_all_together_keep_to_the_size_and_the_least_recently_used_go(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with children(tmp_path, 2) as (one, other):
        one.ask("save 0 1")
        for start in range(1, 121, 10):
            assert one.ask(f"save {start} {start + 10}") == "saved"
            assert other.ask(f"save {start + 200} {start + 210}") == "saved"
            # Used by this process, so that no other one evicts it.
            assert fetch(store, 0) == payload_of(0)
            store.save(make_block(1000 + start), payload_of(1000 + start))
            store.flush()
            assert store.stats.num_bytes <= store.capacity
        assert (one.ask("stats"), other.ask("stats")) == ("0 0 0", "0 0 0")
        kept = found(store, 130)
        assert kept[0] == 0
        assert kept[1:] == list(range(121 - len(kept) + 1, 121))
        assert store.stats.num_deleted < 12 < store.stats.num_blocks
    assert (tmp_path / "blocks.mdb").stat().st_size <= MAX_BYTES
    store.close()


@pytest.mark.parametrize(
    ("seed", "num_kills"), [(1, 2), *(pytest.param(seed, 8, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_writers_that_are_killed_cost_the_others_nothing(tmp_path: Path, seed: int, num_kills: int) -> None:
    """Three processes write while one after the other is killed, and another comes in its place; this one reads."""
    rng = random.Random(seed)
    fill(tmp_path, 3)
    store = open_store(tmp_path)
    with children(tmp_path, 3) as writers:
        for number, child in enumerate(writers):
            child.send(f"write {seed * 100 + number}")
        for turn in range(num_kills):
            victim = writers[rng.randrange(3)]
            for _ in range(rng.randrange(1, 40)):
                assert victim.read()
            victim.kill()
            # Whatever is found is right. Which blocks stay depends on the moment: uses are written with later writes.
            assert found(store, 200)
            store.save(make_block(300 + turn), payload_of(300 + turn), wait=True)
            store.flush()
            assert fetch(store, 300 + turn) == payload_of(300 + turn)
            writers.append(Child(tmp_path))
            assert writers[-1].first == "ready"
            writers[-1].send(f"write {rng.randrange(10**6)}")
            writers[writers.index(victim)] = writers.pop()
            for pipe in (victim.process.stdin, victim.process.stdout):
                assert pipe is not None
                pipe.close()
        stats = store.stats
        assert (stats.num_damaged, stats.num_dropped, stats.num_full) == (0, 0, 0)
    store.close()
    again = open_store(tmp_path)
    assert again.stats.num_damaged == 0
    assert again.stats.num_bytes <= again.capacity
    assert len(found(again, 400)) == again.stats.num_blocks
    again.close()


def test_a_reader_that_is_killed_costs_no_record(tmp_path: Path) -> None:
    """LMDB reuses no page that a reader may read; a file that is full of them is written once the reader is gone."""
    fill(tmp_path, 3)
    store = open_store(tmp_path)
    with children(tmp_path, 1, READER) as (reader,):
        assert reader.first == "reading"
        reader.kill()
        for number in range(3, 203):
            store.save(make_block(number), payload_of(number), wait=True)
            store.flush()
            assert fetch(store, number) == payload_of(number)
        assert (store.stats.num_full, store.stats.num_dropped) == (0, 0)
    store.close()


def test_a_stopped_writer_costs_the_others_records_but_no_wait_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 3)
    store = open_store(tmp_path)
    monkeypatch.setattr("quire.distributed.kvstore.lmdb_file.WRITING_S", 0.2)
    with children(tmp_path, 1, HOLDER) as (holder,):
        assert holder.first == "locked"
        holder.process.send_signal(signal.SIGSTOP)
        for number in range(3, 8):
            store.save(make_block(number), payload_of(number))
        assert found(store, 8) == [0, 1, 2]
        store.flush()
        assert store.stats.num_dropped == 5
        assert found(store, 8) == [0, 1, 2]
        holder.kill()
        store.save(make_block(3), payload_of(3))
        store.flush()
        assert found(store, 8) == [0, 1, 2, 3]
    store.close()


def test_another_size_is_refused_while_others_use_the_folder(tmp_path: Path) -> None:
    with children(tmp_path, 1):
        with pytest.raises(ConfigError, match=f"{MAX_BYTES}; got {2 * MAX_BYTES}") as refused:
            open_store(tmp_path, max_bytes=2 * MAX_BYTES)
        assert refused.value.field == "prefix_cache_disk_bytes"
    open_store(tmp_path, max_bytes=2 * MAX_BYTES).close()


def test_a_damaged_file_in_use_is_a_miss_and_the_next_that_is_alone_sets_it_aside(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    with children(tmp_path, 1) as (child,):
        os.truncate(tmp_path / "blocks.mdb", 8192)
        store = open_store(tmp_path)
        assert store.stats.num_damaged == 1
        assert found(store, 20) == []
        store.save(make_block(1), payload_of(1), wait=True)
        store.flush()
        store.close()
        assert not (tmp_path / "blocks.mdb.damaged").exists()
        assert child.ask("find 20") == ""
        assert child.ask("stats") == "0 1 0"
        # It has left the folder, though it still runs.
        again = open_store(tmp_path)
        assert (tmp_path / "blocks.mdb.damaged").exists()
        again.save(make_block(1), payload_of(1))
        again.flush()
        assert found(again, 20) == [1]
        assert child.ask("find 20") == ""
        assert child.ask("close") == "closed"
        assert found(again, 20) == [1]
        again.close()


def test_a_folder_that_is_being_opened_is_waited_for_in_bounds(tmp_path: Path) -> None:
    first = StoreFolder(tmp_path)
    assert first.is_alone
    with pytest.raises(ConfigError, match=r"being opened by another engine for 0\.1 seconds"):
        StoreFolder(tmp_path, opening_s=0.1)
    first.opened()
    second = StoreFolder(tmp_path)
    assert not second.is_alone
    assert second.key == first.key
    first.close()
    second.close()
    third = StoreFolder(tmp_path)
    assert third.is_alone
    third.close()
