"""The benchmark of the memory manager does its work, notices work that is not done, and judges medians."""

from __future__ import annotations

import sys
from functools import partial

import pytest

from benchmarks import memory
from benchmarks.memory_managers import BLOCK_SIZE, MANAGERS, QuireMemory
from benchmarks.memory_work import WORK, Sizes, prompts
from quire.memory import KVCacheManager

SMALL = Sizes(num_requests=8, num_prompt=64, num_decoding=20, num_steps=32, num_long=256, num_repeats=2)


@pytest.mark.parametrize("window", [None, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WORK)
def test_the_work_is_done_in_some_time(name: str, window: int | None) -> None:
    seconds, version = WORK[name](partial(QuireMemory, window=window), SMALL, 0)
    assert seconds > 0
    assert version.startswith("quire ")


@pytest.mark.parametrize(
    ("name", "owner", "verb"),
    [
        ("distinct", KVCacheManager, "free"),
        ("again", KVCacheManager, "free"),
        ("again", KVCacheManager, "publish"),
        ("evicting", KVCacheManager, "publish"),
        ("evicting", QuireMemory, "take_turns"),
        ("decode", KVCacheManager, "publish"),
        ("decode", QuireMemory, "decode_step"),
        ("look-up", KVCacheManager, "publish"),
    ],
)
def test_a_verb_that_does_nothing_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: type, verb: str
) -> None:
    monkeypatch.setattr(owner, verb, lambda *_: None)
    with pytest.raises(RuntimeError, match=r"not \d+$"):
        WORK[name](QuireMemory, SMALL, 0)


def test_every_piece_of_work_has_a_mark() -> None:
    assert list(memory.SHOWN) == list(WORK)


def test_every_manager_is_compared_once() -> None:
    assert [manager for managers in memory.COMPARED.values() for manager in managers] == list(MANAGERS)


def test_runs_can_be_repeated_and_differ() -> None:
    assert prompts(1, 2, BLOCK_SIZE) == prompts(1, 2, BLOCK_SIZE)
    assert {tuple(prompt) for prompt in prompts(1, 2, BLOCK_SIZE)}.isdisjoint(map(tuple, prompts(2, 2, BLOCK_SIZE)))


def test_managers_take_turns_in_processes_of_their_own() -> None:
    times, versions = memory.measure({"quire": sys.executable}, 2, ["look-up"])
    assert [len(runs) for runs in times["look-up"].values()] == [2]
    assert set(versions) == {"quire"} < set(MANAGERS)


def test_a_verdict_is_the_peers_median_over_quires() -> None:
    table = memory.medians({"hash": {"quire": [1.0, 9.0, 2.0], "vllm": [8.0, 6.0, 1.0]}})
    assert memory.judge(table) == [{"work": "hash", "peer": "vllm", "ratio": 3.0, "at_least": 1.5}]
    assert "vllm 6e+03 ms (3.00x)" in memory.describe("hash", table["hash"])
