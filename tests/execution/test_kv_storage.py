"""The byte layout of cache groups."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from quire.config import CACHE_DTYPES
from quire.execution.step.block_copies import BlockCopier
from quire.execution.step.kv_storage import STORED, KVStorage, StateStorage, make_storages
from quire.memory import FullAttention
from quire.memory.results import BlockCopy
from quire.models.specs.cache_layout import state_bytes
from quire.models.specs.spec import LayerGroup, StateCacheShape, TokenCacheShape

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def numbered(device: str = "cpu", num_blocks: int = 5) -> KVStorage:
    """A small storage in which no two numbers are equal."""
    storage = KVStorage(num_blocks, 2, 4, 3, 8, torch.float32, device)
    storage.data.copy_(torch.arange(storage.data.numel(), device=device).view_as(storage.data))
    return storage


def test_a_block_is_one_range_of_bytes() -> None:
    storage = KVStorage(6, 2, 4, 3, 8, torch.bfloat16, "cpu")
    assert storage.data.shape == (6, 2, 2, 3, 4, 8)
    assert storage.data.dtype == torch.bfloat16
    assert all(storage.data[block_id].is_contiguous() for block_id in range(6))


def test_the_torch_dtypes_are_those_of_the_configuration() -> None:
    assert STORED.keys() == CACHE_DTYPES.keys()
    assert all(STORED[name].itemsize == dtype.element_bytes for name, dtype in CACHE_DTYPES.items())


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_a_block_has_the_bytes_that_memory_counts(name: str) -> None:
    storage = KVStorage(3, 2, 4, 5, 8, torch.bfloat16, "cpu", stored=name)
    shape = {"block_size": 4, "num_layers": 2, "num_kv_heads": 5, "head_dim": 8}
    spec = FullAttention(**shape, **CACHE_DTYPES[name]._asdict())
    assert storage.data[0].nbytes == spec.bytes_per_block


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_made_in_order(device: str) -> None:
    """A chain of copies hands the first block down; a swap through a third block swaps."""
    storage = numbered(device)
    before, blocks = storage.data.clone(), BlockCopier([storage])
    blocks.apply([BlockCopy(0, 1, 2), BlockCopy(0, 2, 3), BlockCopy(0, 4, 2)])
    assert torch.equal(storage.data, before[[0, 1, 4, 1, 4]])
    blocks.apply([BlockCopy(0, 1, 3), BlockCopy(0, 2, 1), BlockCopy(0, 3, 2)])
    assert torch.equal(storage.data, before[[0, 4, 1, 1, 4]])
    blocks.apply(())
    assert torch.equal(storage.data, before[[0, 4, 1, 1, 4]])


def test_groups_share_bytes_and_their_copies_keep_one_order() -> None:
    """What one group gave up, another takes: its copy must come after the move that made room."""
    memory = torch.zeros(6 * 64, dtype=torch.uint8)
    large = KVStorage(3, 1, 4, 1, 4, torch.float32, "cpu", memory)  # blocks of 128 bytes
    small = KVStorage(6, 1, 4, 1, 2, torch.float32, "cpu", memory)  # blocks of 64 bytes
    assert large.data.data_ptr() == small.data.data_ptr() == memory.data_ptr()
    small.data[2].fill_(1.0)
    small.data[4].fill_(2.0)
    large.data[0].fill_(3.0)
    # The small group moves block 4 away; the large one then takes bytes 256 to 384, which were blocks 4 and 5.
    BlockCopier([large, small]).apply([BlockCopy(1, 4, 3), BlockCopy(0, 0, 2)])
    assert small.data[3].eq(2.0).all()
    assert large.data[2].eq(3.0).all()
    assert small.data[2].eq(1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kept", [StateCacheShape(2, 5), StateCacheShape(3, 7, (2, 3, 5)), StateCacheShape(1, 1, (1, 1, 1))], ids=str
)
def test_a_state_is_one_range_of_bytes(kept: StateCacheShape, dtype: torch.dtype) -> None:
    """Views of all layers and parts fill a block without overlap, and sums lie where float32 can be read."""
    layer_bytes = state_bytes(kept, dtype.itemsize)
    assert 0 <= layer_bytes - kept.num_inputs * dtype.itemsize - kept.sum_bytes < 4
    storage = StateStorage(4, 3, kept, dtype, "cpu")
    storage.data.zero_()
    assert storage.data.shape == (4, 3 * layer_bytes)
    for layer_idx in range(3):
        assert storage.conv_states[layer_idx].shape == (4, kept.num_columns, kept.num_channels)
        assert storage.ssm_states[layer_idx].shape == (4, *kept.sums)
        assert storage.ssm_states[layer_idx].data_ptr() % 4 == 0
        storage.conv_states[layer_idx][2] = 1.0 + layer_idx
        storage.ssm_states[layer_idx][2] = -1.0 - layer_idx
    for layer_idx in range(3):
        assert storage.conv_states[layer_idx][2].eq(1.0 + layer_idx).all()
        assert storage.ssm_states[layer_idx][2].eq(-1.0 - layer_idx).all()
    assert not storage.data[[0, 1, 3]].any()
    BlockCopier([storage]).apply([BlockCopy(0, 2, 3), BlockCopy(0, 0, 2)])
    assert storage.conv_states[1][3].eq(2.0).all()
    assert not storage.data[[0, 1, 2]].any()


def test_groups_of_a_model_share_their_bytes() -> None:
    groups = [LayerGroup(2, TokenCacheShape(1, 4)), LayerGroup(3, StateCacheShape(2, 5, (1, 2, 2)))]
    tokens, states = make_storages(groups, (5, 3), 4, torch.float32, "cpu")
    assert tokens.data.shape == (5, 2, 2, 1, 4, 4)
    assert states.data.shape == (3, 3 * 56)
    assert tokens.data.data_ptr() == states.data.data_ptr()


def test_views_name_the_rows_they_say() -> None:
    storage = numbered()
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = storage.data.shape
    for block_id in range(num_blocks):
        for layer_idx in range(num_layers):
            for kv in range(2):
                for head in range(num_kv_heads):
                    row = (block_id * num_layers * 2 + kv) * num_kv_heads + head
                    block = storage.data[block_id, layer_idx, kv, head]
                    assert torch.equal(storage.block_rows[layer_idx][row], block.flatten())
                    for offset in range(block_size):
                        slot = storage.slot_rows[layer_idx][row * block_size + offset]
                        assert torch.equal(slot, block[offset])


def test_memory_is_taken_when_it_is_written() -> None:
    """A gibibyte of blocks costs nothing until one of them is written, and then no more than that one."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    storage = KVStorage(2048, 4, 16, 8, 128, torch.float32, "cpu")
    storage.data[1000].zero_()
    assert storage.data.numel() * 4 == 1 << 30
    assert resident_bytes() - before < 64 << 20
