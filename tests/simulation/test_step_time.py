"""Models of the time of a step."""

from __future__ import annotations

import random

import pytest

from quire.simulation.step_time import FEATURES, ROW_BOUNDS, FittedStepTime, StepItem, features_of, rows_in_ranges
from tests.simulation.fleets import step_time


def test_rows_lie_in_ranges() -> None:
    for num_rows in (1, 2, 7, 16, 100, 256, 1000):
        counts = rows_in_ranges(num_rows)
        assert sum(counts) == num_rows
        assert len(counts) == len(ROW_BOUNDS) + 1
    assert rows_in_ranges(5)[:4] == [1, 1, 2, 1]


def test_features_count_what_rows_see() -> None:
    parts = [StepItem(10, 3, 1), StepItem(0, 2, 0)]
    seen = sum(start + row + 1 for start, count, _ in parts for row in range(count))
    assert features_of(parts) == (5, 2, 10, seen)


def test_the_seconds_are_the_sum_over_the_features() -> None:
    rng = random.Random(3)
    coefficients = {name: rng.random() for name in FEATURES}
    model = FittedStepTime(coefficients)
    for _ in range(50):
        parts = [StepItem(rng.randrange(500), rng.randrange(1, 90), 1) for _ in range(rng.randrange(1, 40))]
        num_rows, num_sequences, num_cached, num_pairs = features_of(parts)
        values = (1, *rows_in_ranges(num_rows), num_sequences, num_cached, num_pairs)
        expected = sum(coefficients[name] * value for name, value in zip(FEATURES, values, strict=True))
        assert model.of_step(parts) == pytest.approx(expected)


@pytest.mark.parametrize("num_sequences", [1, 2, 17, 300])
def test_the_ends_of_decoding_steps_are_those_of_the_steps(num_sequences: int) -> None:
    model, rng = step_time(), random.Random(num_sequences)
    starts = [rng.randrange(1, 900) for _ in range(num_sequences)]
    ends, end_s = [], 1.25
    for step in range(30):
        end_s += model.of_step([StepItem(start + step, 1, 1) for start in starts])
        ends.append(end_s)
    assert model.decode_ends(1.25, num_sequences, sum(starts), 30) == ends
