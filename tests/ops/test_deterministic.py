"""Deterministic kernels: a row gets the same bits in every batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from quire.config import Quantization
from quire.errors import ConfigError
from quire.ops import make_ops
from quire.ops.cpu.native_library import LEVELS, NativeLibrary
from quire.ops.cpu.native_ops import NativeOps
from tests.ops.backends import LIBRARIES
from tests.ops.test_shared_blocks import LAYOUTS
from tests.ops.world import RAGGED, REFERENCE, TOLERANCE, World, randn

pytestmark = pytest.mark.pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BUILT = [level for level in LEVELS if level in LIBRARIES]
# Of one sequence with a context of three parts: its rows in one step, in chunks, one by one, and several histories of
# it side by side, which share what they see.
NUM_TOKENS = 1100
CUTS: list[list[tuple[int, int]]] = [
    [(0, 400), (400, 700)],
    [(0, 130), (130, 33), (163, 900), (1063, 37)],
    [(NUM_TOKENS - 1, 1)],
    [(position, 1) for position in (5, 127, 128, 511, 512, 513, 640, 1023, 1024, 1099)],
    [(700, 3), (1090, 1), (1030, 20), (516, 4), (1096, 4), (200, 100)],
]
SIGHTS: list[dict[str, Any]] = [{}, {"window": 300}, {"chunk": 520}, {"soft_cap": 0.7}]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make(level: str, deterministic: bool = True, quantization: Quantization | None = None) -> NativeOps:
    return NativeOps(NativeLibrary(level, LIBRARIES[level]), quantization, deterministic=deterministic)


def outputs(world: World, ops: NativeOps, queries: torch.Tensor, cut: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Attend with some rows of the world's first sequence, each (first row, rows) as a sequence of its own."""
    batch = world.batch
    block_size = world.kv.data.shape[4]
    lengths = [first + count for first, count in cut]
    tables = [batch.block_ids[: -(-length // block_size)] for length in lengths]
    rows = torch.cat([torch.arange(first, first + count) for first, count in cut])
    of_cut = replace(
        batch,
        slot_mapping=batch.slot_mapping[rows],
        row_starts=[0, *accumulate(count for _, count in cut)],
        context_lens=lengths,
        block_ids=torch.cat(tables),
        block_starts=[0, *accumulate(len(table) for table in tables)],
    )
    return world.attend(ops.step_attention(of_cut, world.kv), queries[rows])


def differing(level: str, deterministic: bool, dtype: torch.dtype, stored: str | None, **sight: Any) -> int:
    """Return in how many of the cuts a row has other bits than in one step of the whole sequence."""
    world = World([(0, NUM_TOKENS)], block_size=8, dtype=dtype, stored=stored, has_sinks="window" in sight, **sight)
    ops = make(level, deterministic)
    queries, expected = world.run(ops)
    found = [outputs(world, ops, queries, cut) for cut in CUTS]
    rows = [torch.cat([torch.arange(first, first + count) for first, count in cut]) for cut in CUTS]
    return sum(not torch.equal(part, expected[of_cut]) for part, of_cut in zip(found, rows, strict=True))


@pytest.mark.parametrize("level", BUILT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [None, "int8"])
@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_a_row_of_attention_gets_the_same_bits(
    level: str, dtype: torch.dtype, stored: str | None, sight: dict[str, Any]
) -> None:
    assert differing(level, True, dtype, stored, **sight) == 0


@pytest.mark.parametrize("level", BUILT)
def test_otherwise_it_need_not(level: str) -> None:
    """Else the test above would show nothing."""
    assert differing(level, False, torch.float32, None) > 1


@pytest.mark.parametrize("level", BUILT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [None, "int8"])
@pytest.mark.parametrize("layout", ["prefix", "tree", "fork", "window", "chunk", 33, 200, "sinks", "caps"])
def test_the_path_of_many_rows_is_right(level: str, dtype: torch.dtype, stored: str | None, layout: str | int) -> None:
    """Beside the reference; slots that nobody sees hold NaN, also those of a tile's first tokens."""
    if layout == "sinks":
        world = World(RAGGED, head_dim=80, dtype=dtype, stored=stored, has_sinks=True)
    elif layout == "caps":
        world = World(RAGGED, dtype=dtype, stored=stored, soft_cap=0.7)
    elif isinstance(layout, int):
        world = World([*RAGGED, (700, 1), (600, 20), (100, 200)], window=layout, dtype=dtype, stored=stored)
    else:
        world = LAYOUTS[layout].world(dtype, stored)
    steps = [ops.step_attention(world.batch, world.kv) for ops in (make(level), REFERENCE)]
    queries = steps[1].prepare(1, world.qkv, world.norms, world.rotation)
    found, expected = (world.attend(step, queries) for step in steps)
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", BUILT)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_linear_layer_gets_the_same_bits(
    level: str, quantization: Quantization | None, dtype: torch.dtype
) -> None:
    ops = make(level, quantization=quantization)
    weight = randn(130, 1100, dtype=dtype) * 0.03
    if quantization is None and dtype not in NativeLibrary(level, LIBRARIES[level]).packed_types:
        with pytest.raises(ConfigError, match="one is of float") as caught:
            ops.pack_linear(weight)
        assert caught.value.field == "deterministic"
        return
    linear = ops.pack_linear(weight, randn(130, dtype=dtype))
    x, residual = randn(200, 1100, dtype=dtype, seed=1), randn(200, 130, dtype=dtype, seed=2)
    expected = linear(x, residual)
    for first, count in [(0, 1), (3, 2), (5, 3), (8, 4), (16, 16), (40, 17), (70, 95), (103, 97)]:
        part = slice(first, first + count)
        assert torch.equal(linear(x[part], residual[part]), expected[part])


def test_it_needs_native_kernels() -> None:
    with pytest.raises(ConfigError, match="kernels 'torch' on device 'cpu'") as caught:
        make_ops(torch.device("cpu"), "torch", deterministic=True)
    assert caught.value.field == "deterministic"
