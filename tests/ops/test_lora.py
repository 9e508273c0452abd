"""What adapters add to a layer's product: kernels of every level beside their twin, and a row's bits in every batch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from quire.ops.interface.lora import LoraLayer, LoraPart, LoraRows, LoraWeight, TorchLoraLayer
from quire.ops.interface.weight_memory import WeightMemory
from tests.ops.backends import CPU_BACKENDS, Backend
from tests.ops.world import randn

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_COLUMNS, SLOTS = 200, 4


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weight(dtype: torch.dtype, width: int, seed: int) -> LoraWeight:
    """Return an adapter of parts of different ranks: all columns, or some, with a gap."""
    ranks = ((8, 5, 16), (3,), (1, 24, 9))[seed % 3]
    starts, ends = ((0, 70, 136), (70, 136, 200)) if seed % 3 != 1 else ((11,), (130,))
    a = randn(sum(ranks), width, dtype=dtype, seed=seed) * 0.3
    parts, first_rank = [], 0
    for idx, (rank, start, end) in enumerate(zip(ranks, starts, ends, strict=True)):
        parts.append(LoraPart(randn(end - start, rank, dtype=dtype, seed=seed + 7 * idx), first_rank, start))
        first_rank += rank
    return LoraWeight(a, tuple(parts))


def filled(layer: LoraLayer, dtype: torch.dtype, width: int) -> LoraLayer:
    """Put adapters into all slots but the second, which has no part in the layer."""
    memory = WeightMemory(1 << 20)
    for slot in (3, 0, 2):
        layer.put(slot, layer.pack(weight(dtype, width, slot), memory))
    return layer


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_layers_are_their_twin(backend: Backend, dtype: torch.dtype) -> None:
    generator = random.Random(5)
    for width in (64, 37):
        layer = filled(backend.make().make_lora(NUM_COLUMNS), dtype, width)
        twin = filled(TorchLoraLayer(NUM_COLUMNS), dtype, width)
        for num_rows in (1, 3, 16, 75):
            x = randn(num_rows, width + 3, dtype=dtype, seed=num_rows)[:, :width]
            rows = LoraRows.of([generator.choice((None, 0, 1, 2, 3, 5)) for _ in range(num_rows)], [1] * num_rows)
            rows = rows or LoraRows(num_rows, {3: [0]})
            for residual in (None, randn(num_rows, NUM_COLUMNS, dtype=dtype, seed=1)):
                found, expected = layer(x, rows, residual), twin(x, rows, residual)
                assert found.dtype == dtype
                torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=2e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS[1:])
def test_a_row_gets_the_same_bits_in_every_batch(backend: Backend) -> None:
    layer = filled(backend.make().make_lora(NUM_COLUMNS), torch.bfloat16, 80)
    x, residual = randn(60, 80, dtype=torch.bfloat16), randn(60, NUM_COLUMNS, dtype=torch.bfloat16, seed=1)
    slots = [(None, 0, 2, 3)[idx * 7 % 4] for idx in range(60)]
    rows = LoraRows.of(slots, [1] * 60)
    assert rows is not None
    together = layer(x, rows, residual)
    for row in (0, 1, 2, 3, 31, 59):
        alone = residual[row : row + 1]
        if (own := LoraRows.of(slots[row : row + 1], [1])) is not None:
            alone = layer(x[row : row + 1], own, alone)
        assert torch.equal(together[row], alone[0])


def test_rows_are_grouped_by_adapter() -> None:
    rows = LoraRows.of([7, None, 2, 7], [2, 1, 3, 1])
    assert rows is not None
    assert (list(rows.slots), list(rows.starts), list(rows.rows)) == ([7, 2], [0, 3, 6], [0, 1, 6, 3, 4, 5])
    assert rows.num_rows == 7
    assert LoraRows.of([None, 3], [4, 0]) is None


def test_a_slot_that_was_emptied_adds_nothing() -> None:
    for layer in (TorchLoraLayer(NUM_COLUMNS), CPU_BACKENDS[0].values[0].make().make_lora(NUM_COLUMNS)):
        filled(layer, torch.float32, 64).put(3, None)
        assert (layer.has([3]), layer.has([1, 0])) == (False, True)
        rows = LoraRows(2, {3: [0], 0: [1]})
        x, residual = randn(2, 64), randn(2, NUM_COLUMNS, seed=1)
        found = layer(x, rows, residual)
        assert torch.equal(found[0], residual[0])
        assert not torch.equal(found[1], residual[1])
