"""A start that fails leaves nothing behind: no process, thread, open file, socket or shared memory.

Each builder of `engine/startup/loading.py` fails in turn, and so does the engine's constructor. The options open all
that a configuration can open on one host, so a part that a builder opens without closing it is left by a later failure.
"""

from __future__ import annotations

import gc
import inspect
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.startup import loading
from quire.errors import RankFailed
from tests.engine.test_kv_events import EVENTS

# Builders that `_load` calls: module functions of `loading`, its own and imported ones, in no particular order.
BUILDERS = sorted(
    name
    for name, value in vars(loading).items()
    if name in loading._load.__code__.co_names and inspect.isfunction(value)
)
# A part that a failing start closes may need a moment to end.
PATIENCE_S = 10.0


class Broken(Exception):
    """The failure of a builder."""


def options_of(folder: Path) -> dict[str, Any]:
    """Return options with which an engine opens stores, a record, a publisher, and a server of blocks."""
    return {
        "num_threads": 1,
        "num_kv_blocks": 64,
        "max_model_len": 128,
        "swap_space": 1 << 20,
        "record_memory": str(folder / "memory.log"),
        "prefix_cache_dir": str(folder / "store"),
        "prefix_cache_url": "redis://127.0.0.1:1",  # nothing listens there, which is no error
        "kv_events_config": EVENTS,
        "kv_transfer_config": {"kv_role": "kv_both", "kv_port": 0},
    }


def open_things() -> Counter[str]:
    """Return the open files, sockets, mappings of shared memory, threads and processes of this process."""
    things: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            things[f"file {target.partition(':')[0] if ':' in target else target}"] += 1
    things.update(f"shared memory {name}" for name in os.listdir("/dev/shm"))
    things.update(f"thread {thread.name}" for thread in threading.enumerate())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, parent = stat.parent.name, stat.read_text().rpartition(")")[2].split()[1]
            things[f"process {name}"] += int(parent) == os.getpid()
    return things


def left_after(before: Counter[str]) -> Counter[str]:
    """Return what is open and was not before, once it does not get less."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := open_things() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return left


def test_the_options_open_something(tmp_path: Path) -> None:
    """The other tests would not fail if nothing was opened; a closed engine leaves nothing either."""
    before = open_things()
    llm = LLM("bundled", **options_of(tmp_path))
    try:
        llm.generate("Once upon a time", SamplingParams(max_tokens=4), use_tqdm=False)
        opened = open_things() - before
        kinds = {kind.partition(" ")[0] for kind in opened}
        assert {"file", "thread"} <= kinds
        assert opened["file socket"] > 2
        assert any(name.endswith("memory.log") for name in opened)
    finally:
        llm.close()
    assert not left_after(before)


@pytest.mark.parametrize("builder", [*BUILDERS, "Engine"])
def test_a_start_that_fails_leaves_nothing(builder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise Broken(builder)

    monkeypatch.setattr(loading, builder, fails)
    before = open_things()
    with pytest.raises(Broken):
        LLM("bundled", **options_of(tmp_path))
    assert not left_after(before)
    assert not (tmp_path / "memory.log").exists(), "the next start could not make it anew"


def test_a_part_that_fails_to_close_leaves_no_other_open(tmp_path: Path) -> None:
    before = open_things()
    llm = LLM("bundled", **options_of(tmp_path))

    def fails() -> None:
        raise Broken

    llm.engine._parts.callback(fails)
    with pytest.raises(Broken):
        llm.close()
    assert not left_after(before)


@pytest.mark.parametrize("builder", ["open_executor", "Engine"])
def test_ranks_end_when_rank_0_does_not_start(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise Broken(builder)

    monkeypatch.setattr(loading, builder, fails)
    before = open_things()
    with pytest.raises((Broken, RankFailed)):
        LLM("bundled", num_threads=1, num_kv_blocks=64, max_model_len=128, tensor_parallel_size=2)
    assert not left_after(before)


def test_the_builders_are_all() -> None:
    """The list has the parts that are opened, so that a change of names does not empty it."""
    assert {"open_tokenizer", "open_publisher", "open_stores", "open_memory", "open_executor", "open_prefetch"} <= set(
        BUILDERS
    )
