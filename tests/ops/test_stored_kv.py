"""Caches of another dtype than the rows', every backend against the slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.execution.step.kv_storage import STORED
from quire.ops.interface.ops import LEAST_SCALED, HeadNorms, Ops, Rotation
from quire.ops.pytorch.torch_widened import narrowed, widened
from quire.ops.reference.reference_ops import restored, stored
from tests.ops.backends import BACKENDS, Backend
from tests.ops.world import RAGGED, REFERENCE, TOLERANCE, World, assert_near, randn

pytestmark = pytest.mark.pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a step of int8, and half a unit in the last of fp8's three bits, of a value of 5.
ROUNDING = {"int8": 0.5 * 5 / 127, "fp8": 5 * 2**-4}
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def check(world: World, ops: Ops) -> None:
    """Compare what a backend stores with what the reference does, and then what both read of the same cache."""
    data = world.kv.data.view(torch.uint8)
    before, element = data.clone(), world.kv.data.dtype
    steps = [each.step_attention(world.batch, world.kv) for each in (REFERENCE, ops)]
    queries = steps[0].prepare(1, world.qkv, world.norms, world.rotation)
    written = data.clone()
    data.copy_(before)
    assert_near(steps[1].prepare(1, world.qkv, world.norms, world.rotation), queries, factor=2)
    # Keys that differ in their last bit may be rounded to the next step.
    found, expected = (restored(each.view(element), world.kv.head_dim) for each in (data, written))
    step = max(2 * TOLERANCE[world.kv.dtype], 0.05 if element == torch.int8 else 0.13)
    torch.testing.assert_close(found, expected, rtol=step, atol=step, equal_nan=True)
    if world.norms is None:
        assert torch.equal(data[:, :, 1], written[:, :, 1])
    assert torch.equal(data[:, [0, 2]], before[:, [0, 2]])
    data.copy_(written)
    expected = world.attend(steps[0], queries)
    found = world.attend(steps[1], queries)
    assert torch.equal(data, written)
    assert found.is_contiguous()
    # Weights may be rounded to the dtype of the values.
    tolerance = 3 * max(TOLERANCE[queries.dtype], TOLERANCE.get(element, 0.0))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STORED)
def test_every_dtype(backend: Backend, dtype: torch.dtype, name: str) -> None:
    spans = [*RAGGED, (1100, 1)]
    for has_norms in (False, True):
        options: dict[str, Any] = {"has_norms": has_norms, "has_sinks": has_norms}
        options["soft_cap"] = 0.7 if has_norms else None
        check(World(spans, **options, dtype=dtype, device=backend.device, stored=name), backend.make())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", pytest.param("fp8", marks=slow)])
@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "group", "head_dim", "window"),
    [
        (8, 1, 1, 64, None),
        (16, 2, 2, 128, 33),
        (64, 1, 16, 80, None),
        (16, 1, 5, 256, 7),
        *(
            pytest.param(*shape, marks=slow)
            for shape in [
                *((block_size, 2, 2, 64, window) for block_size in (1, 8, 16, 32, 64) for window in (None, 1, 16, 33)),
                *((16, 2, 3, head_dim, 20) for head_dim in (6, 16, 72, 80, 96, 128, 192, 256, 288)),
                *((16, 1, group, 128, None) for group in (1, 2, 3, 4, 5, 7, 8, 16)),
            ]
        ),
    ],
    ids=str,
)
def test_shapes(
    backend: Backend,
    dtype: torch.dtype,
    name: str,
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
) -> None:
    spans = [*RAGGED, (600, 1), (500, 3), (100, 90)]
    shape: Any = {"block_size": block_size, "num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim}
    world = World(spans, **shape, window=window, dtype=dtype, device=backend.device, stored=name)
    check(world, backend.make())


def extremes(dtype: torch.dtype, head_dim: int = 64) -> torch.Tensor:
    """Return vectors [15, head_dim] of all sizes that a dtype has, zeros and ties among them."""
    vectors = randn(15, head_dim, seed=7)
    vectors[0] = 0.0
    vectors[1, 1:] = 0.0
    vectors[2] *= 1e-38
    vectors[3] = -vectors[3].abs()
    vectors[4] = LEAST_SCALED
    vectors[5] = 1.01 * LEAST_SCALED
    vectors[6] = torch.arange(head_dim) - head_dim / 2 + 0.5
    vectors[6, 0] = 127.0  # the scale is 1, and all others lie between two steps
    vectors[7] *= 1e3
    vectors[8] = torch.finfo(dtype).max / 2
    vectors[9] = torch.finfo(dtype).tiny
    vectors[10] *= torch.logspace(-8, 0, head_dim)
    return vectors.to(dtype) + 0.0  # no negative zeros, which rotations lose


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_same_bytes_are_stored(backend: Backend, dtype: torch.dtype, head_dim: int, name: str) -> None:
    """Keys that do not turn, and values: to the bit what the definition says, whatever their size."""
    heads = extremes(dtype, head_dim).to(backend.device)
    world = World([(3, 5)], num_kv_heads=1, group=1, head_dim=head_dim, dtype=dtype, device=backend.device, stored=name)
    still = Rotation(torch.ones_like(world.rotation.cos), torch.zeros_like(world.rotation.sin))
    data, slots = world.kv.data, world.batch.slot_mapping
    backend.make().step_attention(world.batch, world.kv).prepare(2, heads.view(5, -1), None, still)
    found = (
        data[slots // 16, 2, :, 0, slots % 16]
        if name == "int8"
        else data.view(torch.uint8)[slots // 16, 2, :, 0, slots % 16]
    )
    expected = torch.stack([stored(vector, STORED[name]) for vector in heads]).view(5, 3, -1)[:, 1:]
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    if name == "int8":
        values = restored(found.view(STORED[name]), head_dim).view(10, -1)
        wide = heads.view(5, 3, -1)[:, 1:].reshape(10, -1).float()
        assert ((values - wide).abs().amax(-1) <= wide.abs().amax(-1) * (0.5 / 127 + 1e-6) + LEAST_SCALED).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_what_stock_operators_narrow_is_what_the_definition_says(name: str) -> None:
    dtype = STORED[name]
    for vectors in (extremes(torch.float32), extremes(torch.bfloat16), randn(300, 96)):
        found = narrowed(vectors, dtype)
        expected = torch.stack([stored(vector, dtype) for vector in vectors])
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        head_dim = vectors.shape[1]
        assert torch.equal(widened(found, head_dim), restored(expected, head_dim))
        assert widened(found, head_dim).isfinite().all()
    near = randn(300, 96)
    assert (widened(narrowed(near, dtype), 96) - near).abs().max() <= ROUNDING[name]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_is_seen_by_whom_it_concerns_only(backend: Backend, dtype: torch.dtype, bad: float) -> None:
    """In a query: its row gets NaN; in a key or in a value: rows that see it do; and no other does."""
    for place in (3, 4 * 64 + 3, -1):
        world = World([(30, 1), (200, 1), (0, 90), (10, 80)], dtype=dtype, device=backend.device, stored="int8")
        starts = world.batch.row_starts
        for seq in (1, 3):
            world.qkv[starts[seq], place] = bad
        _, outputs = world.run(backend.make())
        is_nan = outputs.isnan().any(-1)
        concerned = {starts[1], starts[3]} if place == 3 else {starts[1], *range(starts[3], starts[4])}
        assert set(is_nan.nonzero().flatten().tolist()) == concerned


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_what_is_small_beside_another_counts(backend: Backend, dtype: torch.dtype, num_rows: int) -> None:
    """A query's values that are all the score comes from, and many weights that are small beside a last one."""
    world = World([(381, num_rows)], num_kv_heads=1, group=3, dtype=dtype, device=backend.device, stored="int8")
    world.rotation = Rotation(torch.ones_like(world.rotation.cos), torch.zeros_like(world.rotation.sin))
    history = torch.stack((torch.zeros(64), torch.ones(64))).to(backend.device)
    world.kv.data[world.batch.block_ids, 1] = narrowed(history, torch.int8)[:, None, None]
    heads = world.qkv.view(num_rows, 5, 64)
    heads[:, :3, 0], heads[:, :3, 1:] = 100.0, 1 / 3
    heads[:, 3, 0], heads[:, 3, 1:] = 0.0, 6.25  # a weight of 518 beside those of the history
    heads[:, 4] = -1.0
    world.scale = 1 / 21
    check(world, backend.make())
    assert (world.run(backend.make())[1][0] - (381 - 518) / (381 + 518)).abs().max() < 0.02


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_queries_alone_store_nothing(backend: Backend, name: str) -> None:
    world = World(RAGGED, has_norms=True, device=backend.device, stored=name)
    assert world.norms is not None
    steps = [ops.step_attention(world.batch, world.kv) for ops in (backend.make(), REFERENCE)]
    steps[0].prepare(1, world.qkv, world.norms, world.rotation)
    before = world.kv.data.view(torch.uint8).clone()
    q = world.qkv[:, : 4 * 64].contiguous()
    norms = HeadNorms(world.norms.scales[:4], world.norms.eps)
    found, expected = (step.prepare_queries(q, norms, world.rotation) for step in steps)
    assert_near(found, expected, factor=2)
    assert torch.equal(world.kv.data.view(torch.uint8), before)
    assert_near(*(step.attend(1, expected, world.scale) for step in steps), factor=3)
