"""Triton's recurrences over states, interpreted or on a GPU, row by row and in chunks, against the slow twin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from quire.ops.interface.ops import PagedStates, StateBatch
from tests.ops.test_states import CORRECTED, LAYER, World
from tests.ops.triton.device import DEVICE, MARKS, randn, triton

from quire.ops.reference.reference_states import ReferenceStepStates  # isort: skip - the modules above skip without Triton
from quire.ops.triton.kernels.states import softplus  # isort: skip
from quire.ops.triton.launches import SINGLE_ROWS, Device  # isort: skip
from quire.ops.triton.state_chunks import CHUNK, ChunkPlan  # isort: skip
from quire.ops.triton.step_states import TritonStepStates  # isort: skip
from quire.ops.triton.tiles import MOST_CORRECTED  # isort: skip

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
make_world = partial(World, device=DEVICE)


def make_step(batch: StateBatch, states: PagedStates) -> TritonStepStates:
    return TritonStepStates(batch, states, Device(torch.device(DEVICE)))


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
    world = make_world(
        [(1, True), (5, False), (1, False), (2, True), (11, True)],
        kernel=kernel,
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        state_dim=state_dim,
        dtype=dtype,
    )
    world.check(make_step)


def test_numbers_of_a_step_are_aligned_however_many_there_are() -> None:
    """Kernels would be compiled again for each mix of lists that begin at multiples of 16 bytes and that do not."""
    parts: tuple[list[int], ...] = ([1, 2, 3, 4, 5], [], [6], [7, 8])
    found = Device(torch.device(DEVICE)).sections(*parts)
    assert [part.tolist() for part in found] == list(parts)
    assert all((part.data_ptr() - found[0].data_ptr()) % 16 == 0 for part in found if len(part))


@triton.jit
def store_softplus(output, x):  # type: ignore[no-untyped-def]
    idx = triton.language.arange(0, 1024)
    triton.language.store(output + idx, softplus(triton.language.load(x + idx)))


def test_small_steps_are_not_lost() -> None:
    x = torch.linspace(-60.0, 40.0, 1024, device=DEVICE)
    output = torch.empty_like(x)
    store_softplus[(1,)](output, x)
    torch.testing.assert_close(output, functional.softplus(x), rtol=2e-6, atol=0.0)


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
    world = make_world(
        spans, num_heads=num_heads, num_groups=num_groups, head_dim=head_dim, state_dim=state_dim, dtype=dtype
    )
    world.check(make_step)


def test_nothing_but_chunks() -> None:
    make_world([(CHUNK + 3, False)]).check(make_step)


@pytest.mark.parametrize("head_dim", [1, 80])
def test_nothing_is_read_before_it_is_written(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is taken for chunks is full of NaN here."""
    new_empty = torch.Tensor.new_empty

    def poisoned(tensor: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        found = new_empty(tensor, *size, **options)
        return found.fill_(math.nan) if found.dtype.is_floating_point else found

    world = make_world([(CHUNK + 3, True)], num_heads=1, head_dim=head_dim, state_dim=3)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    world.check(make_step)


def test_keys_that_are_too_wide_for_chunks() -> None:
    make_world([(CHUNK + 3, True), (1, True)], num_heads=1, head_dim=MOST_CORRECTED + 8, state_dim=3).check(make_step)


def test_keys_that_repeat() -> None:
    """Every row corrects all of what the row before it has written: what a chunk's rows do to each other is largest."""
    world = make_world([(2 * CHUNK, True)], num_heads=2)
    world.pairs[:, 1] = world.pairs[0, 1]
    world.steps.fill_(20.0)
    world.heads = world.heads._replace(A=world.heads.A * 1e-4)
    world.check(make_step)


@pytest.mark.parametrize(("query", "key"), [(1e30, 1.0), (1e-30, 1.0), (1.0, 1e-3), (1.0, 1e3)])
def test_queries_and_keys_far_from_1(query: float, key: float) -> None:
    """Queries may have any length; keys that are longer than what is said of them go row by row."""
    num_rows, num_heads = CHUNK + 5, 2
    world = make_world([(num_rows, True)], num_heads=num_heads)
    key_dim, value_dim = world.states.ssm_states[CORRECTED].shape[2:]
    q = randn(num_rows, key_dim, seed=1) * query
    k = functional.normalize(randn(num_rows, key_dim, seed=2), dim=1) * key
    v, rates = randn(num_rows, num_heads * value_dim, seed=3), randn(num_rows, num_heads, seed=4).sigmoid()
    given = q, k, v, -rates.flip(0), rates / max(1.0, key * key)
    before = world.states.data.clone()
    results = []
    for make in (ReferenceStepStates, make_step):
        world.states.data.copy_(before)
        y = make(world.batch, world.states).gated_delta_rule(CORRECTED, *given)
        results.append((y, world.states.ssm_states[CORRECTED][world.batch.block_ids]))
    for found, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=2e-6 * want.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_near_the_ends_of_float32(dtype: torch.dtype) -> None:
    """Parts of 16 bits stand for numbers that float16 does not reach, and for small ones beside them."""
    world = make_world([(CHUNK + 1, True), (CHUNK, True), (CHUNK, False)], num_heads=2, dtype=dtype)
    first, second, _ = world.batch.block_ids
    for layer_idx in (LAYER, CORRECTED):
        sums = world.states.ssm_states[layer_idx]
        sums[first] *= 1e30
        sums[first, :, :, ::2] *= 1e-25
        sums[second] *= 1e-30
        sums[second, 0] = 0.0
    world.check(make_step)


def test_a_row_that_forgets_everything() -> None:
    """Sums of a chunk are huge from there on; the differences after it stay exact."""
    world = make_world([(CHUNK, False)], num_heads=2)
    world.steps.fill_(-4.0)
    world.steps[3] = 80_000.0
    world.check(make_step)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["rows", "steps", "pairs", "values"])
def test_what_is_not_finite(part: str, number: float) -> None:
    """Rows before it, other heads and other sequences get their results; it and what comes after is as it should be."""
    world = make_world([(CHUNK + 40, True), (2 * CHUNK + 3, False), (CHUNK, True), (1, True)], num_heads=2)
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
