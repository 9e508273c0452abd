"""Models of the time of a step."""

from __future__ import annotations

import random

import pytest

from quire.measurement.simulation.replicas.step_time import (
    FEATURES,
    ROW_BOUNDS,
    FittedStepTime,
    StepItem,
    features_of,
    rows_in_ranges,
    shared_tokens,
)
from tests.simulation.fleets import step_time


def test_rows_lie_in_ranges() -> None:
    for num_rows in (1, 2, 7, 16, 100, 256, 1000):
        counts = rows_in_ranges(num_rows)
        assert sum(counts) == num_rows
        assert len(counts) == len(ROW_BOUNDS) + 1
    assert rows_in_ranges(5)[:4] == [1, 1, 2, 1]


def test_features_count_what_rows_see() -> None:
    parts = [StepItem(10, 3, 1, 6), StepItem(0, 2, 0)]
    seen = sum(start + row + 1 for start, count, *_ in parts for row in range(count))
    assert features_of(parts) == (5, 2, 4, 10, seen)


def test_the_seconds_are_the_sum_over_the_features() -> None:
    rng = random.Random(3)
    coefficients = {name: rng.random() for name in FEATURES}
    model = FittedStepTime(coefficients)
    for _ in range(50):
        parts = [StepItem(rng.randrange(500), rng.randrange(1, 90), 1) for _ in range(rng.randrange(1, 40))]
        num_rows, *others = features_of(parts)
        values = (1, *rows_in_ranges(num_rows), *others)
        expected = sum(coefficients[name] * value for name, value in zip(FEATURES, values, strict=True))
        assert model.of_step(parts) == pytest.approx(expected)


@pytest.mark.parametrize("num_sequences", [1, 2, 17, 300])
def test_the_ends_of_decoding_steps_are_those_of_the_steps(num_sequences: int) -> None:
    model, rng = step_time(), random.Random(num_sequences)
    starts = [rng.randrange(1, 900) for _ in range(num_sequences)]
    ends, end_s = [], 1.25
    for step in range(30):
        end_s += model.of_step([StepItem(start + step, 1, 1, start // 2) for start in starts])
        ends.append(end_s)
    num_shared = sum(start // 2 for start in starts)
    assert model.decode_ends(1.25, num_sequences, sum(starts), num_shared, 30) == ends


def test_tokens_that_sequences_share_are_found_by_their_blocks() -> None:
    rng = random.Random(9)
    for _ in range(200):
        stem, tables, next_id = list(range(1, 1 + rng.randrange(1, 40))), [], 100
        for _ in range(rng.randrange(1, 8)):
            own = list(range(next_id, next_id + rng.randrange(1, 6)))
            next_id += 10
            table = stem[: rng.randrange(0, len(stem) + 1)] + own
            tables.append((table, rng.randrange(0, len(table) * 4 + 1)))
        found = shared_tokens(tables, 4)
        for idx, ((table, num_cached), shared) in enumerate(zip(tables, found, strict=True)):
            earlier = [other for other, cached in tables[:idx] if cached]
            common = [next(k for k in range(len(table) + 1) if table[: k + 1] != other[: k + 1]) for other in earlier]
            assert shared <= min(num_cached, 4 * max(common, default=0))
            same = [k for k in common if k]
            if same and num_cached:
                first_and_last = (same[0], same[-1])
                assert shared == min(num_cached, 4 * max(first_and_last))
