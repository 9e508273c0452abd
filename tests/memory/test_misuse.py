"""Misuse of a pool is an error before anything has changed, also with `python -O`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from quire.errors import InvariantViolation
from quire.memory import FullAttention, KVCacheManager, Namespace, SlidingWindow, check
from quire.memory.invariants import snapshot
from quire.memory.pool.pool import BlockPool

SPECS = [
    [FullAttention(block_size=2)],
    [FullAttention(block_size=2), SlidingWindow(block_size=2, window=3)],
    [FullAttention(block_size=2, num_layers=3), SlidingWindow(block_size=2, window=3)],
]


def lived_in(specs: list[FullAttention | SlidingWindow]) -> KVCacheManager:
    """Return memory with a sequence that lives and one that has ended."""
    manager = KVCacheManager(specs, num_bytes=400)
    for seq_id in (1, 2):
        chain = manager.chain([seq_id] * 6, Namespace())
        manager.allocate(seq_id, chain, manager.match_prefix(chain))
        manager.append_slots((seq_id,), 6)
        manager.publish(seq_id, 6)
    manager.free(2)
    check(manager)
    return manager


def release_a_free_block(pool: BlockPool, used: int) -> None:
    """Ask for the release of a used block and a free one: of neither, then."""
    pool.release([used, next(idx for idx, count in enumerate(pool.ref_counts) if not count and idx not in pool.index)])


def release_an_idle_block(pool: BlockPool, used: int) -> None:
    """Ask for the release of a used block and an idle one."""
    pool.release([used, next(iter(pool.idle))])


def release_a_block_twice_at_once(pool: BlockPool, used: int) -> None:
    """Name a block twice."""
    pool.release([used, used])


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize(
    "misuse",
    [release_a_free_block, release_an_idle_block, release_a_block_twice_at_once],
    ids=lambda case: case.__name__,
)
def test_a_block_released_twice_is_an_error_and_changes_nothing(
    misuse: Callable[[BlockPool, int], None], specs: list[FullAttention | SlidingWindow]
) -> None:
    manager = lived_in(specs)
    before = snapshot(manager)
    with pytest.raises(InvariantViolation, match="M2"):
        misuse(manager.groups[0].pool, manager.block_table(1)[0])
    assert snapshot(manager) == before


@pytest.mark.parametrize("specs", SPECS)
def test_more_blocks_than_there_are_cannot_be_taken(specs: list[FullAttention | SlidingWindow]) -> None:
    manager = lived_in(specs)
    with pytest.raises(InvariantViolation, match="M1"):
        manager.groups[0].pool.take(1000)


def test_no_check_depends_on_assertions() -> None:
    """`python -O` leaves assertions out."""
    script = """
from quire.errors import InvariantViolation
from tests.memory.test_misuse import SPECS, lived_in
for specs in SPECS:
    pool = lived_in(specs).groups[0].pool
    used = next(idx for idx, count in enumerate(pool.ref_counts) if count == 1)
    pool.release([used])
    for misuse in (lambda: pool.release([used]), lambda: pool.take(1000)):
        try:
            misuse()
        except InvariantViolation:
            print("refused")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-O", "-c", script], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert run.stdout.split() == ["refused"] * 2 * len(SPECS)
