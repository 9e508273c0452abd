"""Triton's recurrences over states, interpreted, row by row and in chunks, against the slow twin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.ops.test_states import CORRECTED, LAYER, World
from tests.ops.triton.interpreted import MARKS

from quire.ops.reference_states import ReferenceStepStates  # isort: skip - the modules above skip without Triton
from quire.ops.triton.launches import SINGLE_ROWS, Device  # isort: skip
from quire.ops.triton.state_chunks import CHUNK, ChunkPlan  # isort: skip
from quire.ops.triton.step_states import TritonStepStates  # isort: skip

pytestmark = MARKS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Beside sequences of few rows: the fewest that are a chunk, a whole one, one row less and more, and several chunks.
MIXED = [
    (1, True),
    (SINGLE_ROWS + 1, True),
    (CHUNK, True),
    (SINGLE_ROWS, False),
    (CHUNK - 1, False),
    (CHUNK + 1, False),
]
MIXED += [(1, False), (2 * CHUNK + 5, True)]
make_step = partial(TritonStepStates, device=Device(torch.device("cpu")))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_groups", "kernel"), [(2, 1, 2), (4, 2, 4), (3, 3, 9)])
@pytest.mark.parametrize(("head_dim", "state_dim"), [(1, 1), (5, 7), (32, 16)])
def test_row_by_row(
    dtype: torch.dtype, num_heads: int, num_groups: int, kernel: int, head_dim: int, state_dim: int
) -> None:
    """Sequences with a state and without, of fewer rows than a convolution sees, and of more."""
    world = World(
        [(1, True), (5, False), (1, False), (2, True), (11, True)],
        kernel=kernel,
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        state_dim=state_dim,
        dtype=dtype,
    )
    world.check(make_step)


def test_plan() -> None:
    plan = ChunkPlan.of([0, 1, 1 + SINGLE_ROWS, 2 + 2 * SINGLE_ROWS, 2 + 2 * SINGLE_ROWS + 2 * CHUNK + 1], SINGLE_ROWS)
    first, second = 1 + SINGLE_ROWS, 2 + 2 * SINGLE_ROWS
    ends = [second, second + CHUNK, second + 2 * CHUNK, second + 2 * CHUNK + 1]
    assert plan == ([2, 3], [0, 1, 4], [first, second, second + CHUNK, second + 2 * CHUNK], ends)
    assert ChunkPlan.of([0, SINGLE_ROWS], SINGLE_ROWS) == ([], [0], [], [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "state_dim"), [(1, 1), (5, 7), (64, 128), (80, 24), (40, 256)])
def test_in_chunks(dtype: torch.dtype, head_dim: int, state_dim: int) -> None:
    # Wide states are carried slowly here.
    spans, num_heads, num_groups = (MIXED, 4, 2) if state_dim < 64 else (MIXED[-2:], 2, 1)
    world = World(
        spans, num_heads=num_heads, num_groups=num_groups, head_dim=head_dim, state_dim=state_dim, dtype=dtype
    )
    world.check(make_step)


def test_nothing_but_chunks() -> None:
    World([(CHUNK + 3, False)]).check(make_step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_near_the_ends_of_float32(dtype: torch.dtype) -> None:
    """Parts of 16 bits stand for numbers that float16 does not reach, and for small ones beside them."""
    world = World([(CHUNK + 1, True), (CHUNK, True), (CHUNK, False)], num_heads=2, dtype=dtype)
    sums = world.states.ssm_states[LAYER]
    first, second, _ = world.batch.block_ids
    sums[first] *= 1e30
    sums[first, :, :, ::2] *= 1e-25
    sums[second] *= 1e-30
    sums[second, 0] = 0.0
    world.check(make_step)


def test_a_row_that_forgets_everything() -> None:
    """Sums of a chunk are huge from there on; the differences after it stay exact."""
    world = World([(CHUNK, False)], num_heads=2)
    world.steps.fill_(-4.0)
    world.steps[3] = 80_000.0
    world.check(make_step)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["rows", "steps", "pairs", "values"])
def test_what_is_not_finite(part: str, number: float) -> None:
    """Rows before it, other heads and other sequences get their results; it and what comes after is as it should be."""
    world = World([(CHUNK + 40, True), (2 * CHUNK + 3, False), (CHUNK, True), (1, True)], num_heads=2)
    bad = CHUNK + 40 + CHUNK + 20
    getattr(world, part)[bad, ..., 0] = number
    before = world.states.data.clone()
    expected = world.run(ReferenceStepStates)[1:]
    expected += [world.states.ssm_states[layer_idx].clone() for layer_idx in (LAYER, CORRECTED)]
    world.states.data.copy_(before)
    found = world.run(make_step)[1:] + [world.states.ssm_states[layer_idx] for layer_idx in (LAYER, CORRECTED)]
    for each, want in zip(found, expected, strict=True):
        torch.testing.assert_close(each, want, rtol=1e-5, atol=1e-4, equal_nan=True)
    is_finite = [y.isfinite().all(1) for y in expected[:2]]
    assert all(each[:bad].all() and each[bad + CHUNK - 17 :].all() for each in is_finite)
    assert not all(each.all() for each in is_finite)
