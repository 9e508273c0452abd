"""Random draws: a good hash, the right distribution, and no dependence on anything else."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.execution.sampling.rows import CHUNK, ascending_order, stable_topk
from quire.execution.sampling.sampling import Filter, draw, invert_cdf, uniform

# The 99.9999% quantile of chi-square is about k + 4.75 sqrt(2 k) + 15 for k degrees of freedom, and a little less.
NUM_BINS = 64


def chi_square(observed: list[int], expected: list[float]) -> float:
    return math.fsum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


def limit(degrees: int) -> float:
    return degrees + 4.75 * math.sqrt(2 * degrees) + 15


AXES: dict[str, Callable[[int], float]] = {
    "seeds": lambda i: uniform(i, 0, 5),
    "spread seeds": lambda i: uniform((i - 5000) << 40, 0, 5),
    "samples": lambda i: uniform(42, i, 5),
    "positions": lambda i: uniform(42, 0, i),
    "samples against positions": lambda i: uniform(42, i % 100, i // 100),
}


@pytest.mark.parametrize("axis", AXES)
def test_points_are_uniform_and_neighbours_independent(axis: str) -> None:
    points = [AXES[axis](i) for i in range(10_000)]
    assert all(0.0 <= point < 1.0 for point in points)
    assert len(set(points)) == len(points)
    bins = Counter(int(point * NUM_BINS) for point in points)
    assert chi_square([bins[i] for i in range(NUM_BINS)], [len(points) / NUM_BINS] * NUM_BINS) < limit(NUM_BINS - 1)
    pairs = Counter((int(a * 8), int(b * 8)) for a, b in itertools.pairwise(points))
    expected = [(len(points) - 1) / 64] * 64
    assert chi_square([pairs[i, j] for i in range(8) for j in range(8)], expected) < limit(63)


def test_points_do_not_change_between_versions() -> None:
    """A seed's tokens are part of what a user may rely on."""
    known = [0.13870941014555427, 0.2815569767288524, 0.1292377315162001]
    assert [uniform(0, 0, 0), uniform(-1, 2, 3), uniform(2**63 - 1, 0, 10**6)] == known


FILTERS = {
    "whole": Filter(1.0, 0, 1.0, 0.0),
    "hot": Filter(2.5, 0, 1.0, 0.0),
    "top_k": Filter(1.0, 3, 1.0, 0.0),
    "nucleus": Filter(0.8, 0, 0.75, 0.0),
    "min_p": Filter(1.0, 0, 1.0, 0.2),
}
# What each keeps of the eight tokens, worked out by hand.
KEPT = {"whole": 8, "hot": 8, "top_k": 3, "nucleus": 3, "min_p": 4}


@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_are_those_of_the_filtered_distribution(name: str) -> None:
    shares = [0.30, 0.24, 0.18, 0.10, 0.05, 0.05, 0.05, 0.03]
    kept = [share ** (1 / FILTERS[name].temperature) for share in shares[: KEPT[name]]]
    expected = [20_000 * weight / math.fsum(kept) for weight in kept]
    points = torch.tensor([[uniform(3, i, 17) for i in range(20_000)]], dtype=torch.float64)
    # Shuffled, so that likely tokens and low ids are not the same.
    order = [5, 2, 7, 0, 6, 1, 3, 4]
    logits = torch.empty(1, 8)
    logits[0, order] = torch.tensor(shares).log() + 4.0
    drawn = Counter(draw(logits, [FILTERS[name]], points)[0].tolist())
    assert set(drawn) == set(order[: KEPT[name]])
    observed = [drawn[token_id] for token_id in order[: KEPT[name]]]
    assert chi_square(observed, expected) < limit(KEPT[name] - 1)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.25, 1.0]), min_size=1, max_size=300).filter(any),
    point=st.floats(0.0, 1.0, exclude_max=True),
)
def test_inversion_finds_the_first_column_past_the_point(weights: list[float], point: float) -> None:
    column = int(invert_cdf(torch.tensor([weights]), torch.tensor([[point]], dtype=torch.float64))[0, 0])
    assert weights[column] > 0.0
    exact = [weight for weight in weights if weight != 1e-30]
    if len(exact) == len(weights):  # sums of quarters are exact, so there is one right answer
        target = point * math.fsum(weights)
        assert math.fsum(weights[:column]) <= target < math.fsum(weights[: column + 1])


def test_points_on_the_seams_of_chunks_find_columns_above_zero() -> None:
    """Where the sum of a chunk and the running sum within it round differently."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(300, 300, generator=generator) ** 8
    for seam in (0, CHUNK, 2 * CHUNK, 300):
        weights[:, max(seam - 3, 0) : seam + 3] = 0.0
    reached = weights.double().cumsum(-1)
    seams = reached[:, [CHUNK - 1, 2 * CHUNK - 1, 299]] / reached[:, -1:]
    points = torch.cat((seams, seams.nextafter(torch.tensor(0.0)), seams.nextafter(torch.tensor(2.0))), dim=1)
    points = points.clamp(max=1 - 2**-53)
    columns = invert_cdf(weights, points)
    assert int(columns.max()) < 300
    assert bool((weights.gather(1, columns) > 0.0).all())


@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=30, max_size=30), min_size=1, max_size=4),
    count=st.integers(1, 30),
)
def test_likeliest_breaks_ties_by_token_id(rows: list[list[int]], count: int) -> None:
    values, ids = stable_topk(torch.tensor(rows, dtype=torch.float32), count)
    for row, row_values, row_ids in zip(rows, values.tolist(), ids.tolist(), strict=True):
        assert row_ids == sorted(range(30), key=lambda i: (-row[i], i))[:count]
        assert row_values == [row[i] for i in row_ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    values=st.lists(
        st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, 1.0, -1.0]),
        min_size=1,
        max_size=60,
    )
)
def test_the_order_of_a_row_is_that_of_a_stable_sort(dtype: torch.dtype, values: list[float]) -> None:
    rows = torch.tensor([values, values[::-1]], dtype=dtype)
    assert torch.equal(ascending_order(rows), rows.argsort(dim=-1, stable=True))


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_vanishing_temperatures_are_greedy_and_never_overflow(temperature: float) -> None:
    logits = torch.tensor([[3.0, -80.0, 88.0, 87.5]])
    points = torch.tensor([[0.0, 0.5, 1 - 2**-53]], dtype=torch.float64)
    assert draw(logits, [Filter(temperature, 0, 0.9, 0.0)], points).tolist() == [[2, 2, 2]]
