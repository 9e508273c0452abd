"""Block copies between the tiers, in order, for every pair of tiers."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
import torch

from quire.execution.step.block_copies import BlockCopier
from quire.execution.step.kv_storage import KVStorage
from quire.memory.results import BlockCopy, Tier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
D, H = Tier.DEVICE, Tier.HOST
BLOCK_BYTES = (2 * 2 * 2 * 4 * 8 * 4, 1 * 2 * 2 * 4 * 8 * 4)


def storages(device: str, num_blocks: int = 6) -> list[KVStorage]:
    """Two groups with blocks of different bytes, each in memory of its own."""
    return [KVStorage(num_blocks, layers, 4, 2, 8, torch.float32, device) for layers in (2, 1)]


def stamp(storage: KVStorage, block_id: int, number: float) -> None:
    storage.data[block_id] = number


def stamps(storage: KVStorage) -> list[float]:
    """Return the number that each block is full of."""
    rows = storage.data.flatten(1).cpu()
    assert rows.eq(rows[:, :1]).all(), "a block is torn"
    return rows[:, 0].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_host_block_is_reused_within_one_list(device: str) -> None:
    group, _ = both = storages(device)
    for block_id in range(6):
        stamp(group, block_id, float(block_id))
    blocks = BlockCopier(both, host_bytes=3 * BLOCK_BYTES[0])
    # Out, moved within the host, back in; and the host block of the first is taken by the next one out.
    blocks.apply(
        [
            BlockCopy(0, 1, 1, D, H),
            BlockCopy(0, 1, 2, H, H),
            BlockCopy(0, 5, 1, D, H),
            BlockCopy(0, 2, 5, D, D),
            BlockCopy(0, 2, 3, H, D),
            BlockCopy(0, 1, 4, H, D),
        ]
    )
    assert stamps(group) == [0.0, 1.0, 2.0, 1.0, 5.0, 2.0]


@pytest.mark.parametrize("device", DEVICES)
def test_any_list_of_copies_does_what_a_table_of_contents_says(device: str) -> None:
    rng = random.Random(3)
    both = storages(device)
    host_bytes = 5 * BLOCK_BYTES[0]
    # The groups share the host's bytes, as they do the device's: each keeps to its own half.
    ids = {(0, D): range(6), (1, D): range(6), (0, H): range(2), (1, H): range(6, 10)}
    contents = {(group, tier, block_id): 0.0 for (group, tier), block_ids in ids.items() for block_id in block_ids}
    for group_idx, storage in enumerate(both):
        for block_id in range(6):
            contents[group_idx, D, block_id] = float(10 * group_idx + block_id)
            stamp(storage, block_id, contents[group_idx, D, block_id])
    blocks = BlockCopier(both, host_bytes)
    blocks.apply([BlockCopy(group_idx, 0, block_id, D, H) for group_idx in (0, 1) for block_id in ids[group_idx, H]])
    for group_idx in (0, 1):
        contents |= {(group_idx, H, block_id): contents[group_idx, D, 0] for block_id in ids[group_idx, H]}
    for _ in range(40):
        copies = []
        for _ in range(rng.randrange(8)):
            group_idx, src_tier, dst_tier = rng.randrange(2), rng.choice((D, H)), rng.choice((D, H))
            src_id, dst_id = rng.choice(ids[group_idx, src_tier]), rng.choice(ids[group_idx, dst_tier])
            copies.append(BlockCopy(group_idx, src_id, dst_id, src_tier, dst_tier))
            contents[group_idx, dst_tier, dst_id] = contents[group_idx, src_tier, src_id]
        blocks.apply(copies)
        for group_idx, storage in enumerate(both):
            assert stamps(storage) == [contents[group_idx, D, block_id] for block_id in range(6)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_rate_is_measured_and_moves_nothing_that_stays(device: str) -> None:
    both = storages(device)
    for block_id in range(6):
        stamp(both[0], block_id, float(block_id))
    rate = BlockCopier(both, host_bytes=4 * BLOCK_BYTES[0]).measure_copies()
    assert rate is not None
    assert rate > 0
    assert stamps(both[0]) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert BlockCopier(both).measure_copies() is None


def test_host_memory_is_taken_when_a_block_moves_there() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    both = storages("cpu")
    before = resident_bytes()
    blocks = BlockCopier(both, host_bytes=1 << 30)
    blocks.apply([BlockCopy(0, 1, 1000, D, H)])
    assert resident_bytes() - before < 64 << 20
