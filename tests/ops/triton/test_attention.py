"""Triton's paged attention, interpreted or on a GPU, against the slow twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.ops.interface.ops import HeadNorms
from tests.ops.test_shared_blocks import LAYOUTS, Layout
from tests.ops.test_stored_kv import check as check_stored
from tests.ops.triton.device import DEVICE, MARKS, make_ops, make_world
from tests.ops.world import REFERENCE, World, assert_near

from quire.ops.triton.attention.step_attention import TritonStepAttention  # isort: skip - the modules above skip without Triton

pytestmark = MARKS

# A decode at both sides of a block's end, a prompt, rows behind a history, and a context in three splits.
RAGGED = [(15, 1), (16, 1), (0, 1), (0, 3), (30, 9), (600, 1)]
SHORT = [(30, 1), (0, 3), (70, 12)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
def test_ragged_rows(dtype: torch.dtype, has_norms: bool) -> None:
    make_world(RAGGED, dtype=dtype, head_dim=16, has_norms=has_norms, has_sinks=has_norms).check(make_ops())


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 288])
def test_head_dims(head_dim: int) -> None:
    make_world(SHORT, head_dim=head_dim, has_norms=True, dtype=torch.bfloat16).check(make_ops())


@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (3, 2), (1, 3), (1, 7), (2, 8), (1, 16), (1, 24)])
def test_heads(num_kv_heads: int, group: int) -> None:
    world = make_world(SHORT, num_kv_heads=num_kv_heads, group=group, head_dim=16, has_value_norms=True, has_sinks=True)
    world.check(make_ops())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"has_sinks": True}, {"window": 100}, {"chunk": 90}, {"soft_cap": 3.0}], ids=str
)
def test_prompts_of_many_tiles(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Tiles that all rows see whole, then tiles under masks: values are added behind the scores of the next tile."""
    spans = [(0, 260), (391, 70), (64, 64), (0, 65)]
    make_world(spans, num_kv_heads=1, group=3, head_dim=80, dtype=dtype, **options).check(make_ops())


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scores_that_are_turned_round_or_all_equal(scale: float) -> None:
    world = make_world([(70, 3), (0, 90)], head_dim=64)
    world.scale = scale
    world.check(make_ops())


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_block_sizes(block_size: int) -> None:
    make_world(SHORT, block_size=block_size, head_dim=16).check(make_ops())


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 16}, {"window": 33}, {"window": 900}, {"chunk": 7}, {"chunk": 40}], ids=str
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_and_chunks(options: dict[str, Any], has_sinks: bool) -> None:
    """All that no row sees is NaN, in the cache and behind the table's entries."""
    spans = [*SHORT, (39, 1), (40, 1), (38, 4), (620, 1)]
    make_world(spans, **options, head_dim=16, has_sinks=has_sinks).check(make_ops())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", ["int8", "fp8"])
@pytest.mark.parametrize("has_norms", [False, True])
def test_stored_caches(dtype: torch.dtype, stored: str, has_norms: bool) -> None:
    """Those with norms have soft caps of scores too."""
    options: dict[str, Any] = {"has_norms": has_norms, "soft_cap": 0.7 if has_norms else None}
    check_stored(make_world([*SHORT, (600, 1)], dtype=dtype, head_dim=16, stored=stored, **options), make_ops())


@pytest.mark.parametrize("stored", ["int8", "fp8"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0, 1e-38])
def test_stored_bytes_are_the_twins(stored: str, scale: float) -> None:
    """Those of values, which are neither normed nor rotated: halves of steps, subnormal numbers, those out of range."""
    world = make_world([(0, 40)], head_dim=16, stored=stored)
    world.qkv *= scale
    written = []
    for ops in (REFERENCE, make_ops()):
        world.run(ops)
        written.append(world.kv.data.view(torch.uint8).clone())
    assert torch.equal(written[0][:, 1, 1], written[1][:, 1, 1])


def test_a_float8_and_an_int8_that_is_no_number() -> None:
    for stored in ("fp8", "int8"):
        world = make_world([(0, 4), (0, 4)], head_dim=16, stored=stored)
        world.qkv[0, -3] = float("nan")
        world.qkv[4, -3] = float("inf")
        for ops in (REFERENCE, make_ops()):
            found = world.run(ops)[1].view(8, 4, 16)
            assert not found[:, :2].isnan().any()
            assert found[:4, 2:].isnan().any()
            if stored == "int8":
                assert found[:, 2:].isnan().all()


@pytest.mark.parametrize("soft_cap", [0.02, 0.5, 50.0])
@pytest.mark.parametrize("options", [{}, {"window": 33, "has_sinks": True}, {"num_kv_heads": 1, "group": 8}], ids=str)
def test_soft_caps_of_scores(soft_cap: float, options: dict[str, Any]) -> None:
    """Of scores that are all at the cap, that feel it, and that hardly do; in splits, and of prompts."""
    make_world([*RAGGED, (600, 1)], **options, head_dim=16, soft_cap=soft_cap).check(make_ops())


def test_soft_caps_of_scores_of_any_size() -> None:
    world = make_world(RAGGED, head_dim=16, soft_cap=2.0)
    world.scale = 1e4
    assert_near(world.run(make_ops())[1], world.run(REFERENCE)[1], factor=100)
    world.qkv[0, :16] = float("nan")
    found = world.run(make_ops())[1].view(-1, 4, 16)
    assert found[0, 0].isnan().all()
    assert not found[1:].isnan().any()


def test_sinks_of_any_size() -> None:
    world = make_world(RAGGED, head_dim=16, has_sinks=True)
    world.sinks.copy_(torch.tensor([1e6, -1e6, float("-inf"), float("nan")]))
    found = world.run(make_ops())[1].view(-1, 4, 16)
    world.sinks = None
    plain = world.run(make_ops())[1].view(-1, 4, 16)
    assert found[:, 0].eq(0.0).all()
    assert torch.equal(found[:, 1:3], plain[:, 1:3])
    assert found[:, 3].isnan().all()


@pytest.mark.parametrize("has_norms", [False, True])
def test_queries_alone(has_norms: bool) -> None:
    """Nothing is stored with them, and a layer with fewer query heads reads the same cache."""
    world = make_world(SHORT, head_dim=16, has_norms=has_norms)
    steps = [ops.step_attention(world.batch, world.kv) for ops in (make_ops(), REFERENCE)]
    queries = steps[0].prepare(1, world.qkv, world.norms, world.rotation)
    kept = world.kv.data.clone()
    for num_heads in (4, 2):
        q = world.qkv[:, : num_heads * 16].contiguous()
        norms = None if world.norms is None else HeadNorms(world.norms.scales[:num_heads], world.norms.eps)
        found, expected = (step.prepare_queries(q, norms, world.rotation) for step in steps)
        assert_near(found, expected, factor=2)
        assert torch.equal(found, queries[:, :num_heads])
        assert torch.equal(world.kv.data.nan_to_num(), kept.nan_to_num())
        assert_near(*(step.attend(1, expected, world.scale) for step in steps), factor=2)


# What rows of several sequences see of the same blocks, in whole tiles of 64 tokens, and whether it is read once.
SHARED: dict[str, tuple[Layout, bool]] = {
    **{name: (LAYOUTS[name], True) for name in ("prefix", "short", "tree", "fork")},
    # More rows than a tile has.
    "many": (Layout([(300, 1)] * 40, [(seq, 0, 0, 288) for seq in range(1, 40)], 0), True),
    "chunks": (LAYOUTS["chunks"], False),
    "middle": (LAYOUTS["middle"], False),
    # Rows of a draft share a tile with those of other sequences; a prompt beside them reads by itself.
    "drafts": (
        Layout([(560, 3), (100, 1), (0, 40), (530, 1), (700, 2)], [(3, 0, 0, 512), (4, 0, 0, 512)], 0),
        True,
    ),
    # The first two see their beginning, the others only what is behind it.
    "window": (
        Layout([(320, 1), (350, 2), (700, 1), (710, 1)], [(seq, 0, 0, 304) for seq in (1, 2, 3)], 0, window=400),
        True,
    ),
    "past a window": (Layout([(700, 1), (710, 1)], [(1, 0, 0, 688)], 0, window=300), False),
    "chunk": (Layout([(390, 1), (350, 1), (450, 1)], [(1, 0, 0, 304), (2, 0, 0, 304)], 0, chunk=400), True),
}


def check_shared(world: World, is_shared: bool, group: int = 2) -> None:
    """Compare with the reference, and see that a key which several rows see is loaded once for them."""
    step = REFERENCE.step_attention(world.batch, world.kv)
    queries = step.prepare(1, world.qkv, world.norms, world.rotation)
    expected = world.attend(step, queries)
    ops = make_ops()
    ops.device.launch_bytes = 0  # a GPU does not launch another kernel for what is so little
    found = ops.step_attention(world.batch, world.kv)
    assert isinstance(found, TritonStepAttention)
    assert_near(world.attend(found, queries), expected, factor=3)
    shared = [items.shared for items in found._launches(group, len(queries)) if items.shared is not None]
    assert bool(shared) == is_shared


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_shared_blocks(name: str, has_sinks: bool) -> None:
    layout, is_shared = SHARED[name]
    # Those with sinks have soft caps too.
    options: dict[str, Any] = {"has_sinks": has_sinks, "soft_cap": 0.7 if has_sinks else None}
    check_shared(layout.world(torch.float32, head_dim=16, **options, device=DEVICE), is_shared)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [None, "int8", "fp8"])
def test_shared_blocks_in_all_dtypes(dtype: torch.dtype, stored: str | None) -> None:
    check_shared(LAYOUTS["tree"].world(dtype, stored, head_dim=32, device=DEVICE), True)


@pytest.mark.parametrize(
    ("block_size", "group", "head_dim"), [(8, 1, 80), (32, 4, 128), (16, 16, 64), (64, 3, 256), (1, 7, 16)], ids=str
)
def test_shared_blocks_of_all_shapes(block_size: int, group: int, head_dim: int) -> None:
    world = LAYOUTS["prefix"].world(
        torch.bfloat16,
        block_size=block_size,
        group=group,
        head_dim=head_dim,
        num_kv_heads=1,
        has_norms=True,
        device=DEVICE,
    )
    check_shared(world, True, group)


def test_rows_that_share_a_tile_do_not_meet() -> None:
    """A NaN in the query of one, or in its own tokens, is its own."""
    for place in (0, -1):
        world = LAYOUTS["prefix"].world(torch.float32, head_dim=16, device=DEVICE)
        world.qkv[2, place] = float("nan")
        outputs = world.run(make_ops())[1]
        assert outputs.isnan().any(-1).tolist() == [False, False, True, False]


def test_a_gpu_reads_separately_what_is_not_worth_a_launch() -> None:
    for launch_bytes, is_shared in ((1 << 17, True), (1 << 20, False)):
        world = LAYOUTS["prefix"].world(torch.float32, head_dim=16, device=DEVICE)
        ops = make_ops()
        ops.device.launch_bytes = launch_bytes
        step = ops.step_attention(world.batch, world.kv)
        assert isinstance(step, TritonStepAttention)
        assert any(items.shared is not None for items in step._launches(2, 4)) == is_shared
