"""The fit of step times to measured steps."""

from __future__ import annotations

import random

import pytest

from quire.errors import ConfigError
from quire.measurement.simulation.replicas.fit import (
    MIN_STEPS,
    MeasuredStep,
    fit_step_time,
    quality_of,
    solve_non_negative,
)
from quire.measurement.simulation.replicas.step_time import FEATURES, ROW_NAMES, FittedStepTime, StepItem


def random_parts(rng: random.Random) -> list[StepItem]:
    """Return a step of decoding sequences and, at times, chunks of prompts."""
    parts = []
    for _ in range(rng.randrange(1, 40)):
        start = rng.randrange(1, 2000)
        parts.append(StepItem(start, 1, 1, start // 2 if rng.random() < 0.3 else 0))
    if rng.random() < 0.5:
        parts.append(StepItem(rng.choice((0, 64, 512)), rng.randrange(2, 400), 1))
    return parts


def steps_of(model: FittedStepTime, count: int, seed: int, noise: float = 0.0) -> list[MeasuredStep]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        parts = random_parts(rng)
        made.append(MeasuredStep(parts, model.of_step(parts) * (1 + rng.gauss(0, noise))))
    return made


def true_model() -> FittedStepTime:
    rows = dict.fromkeys(ROW_NAMES, 2e-4) | {"rows_to_4": 0.0, "rows_to_8": 1e-3}
    rest = {"step": 0.02, "sequences": 1e-5, "read_tokens": 1e-6, "cached_tokens": 0.0, "pairs": 3e-8}
    return FittedStepTime({**rows, **rest})


def test_exact_steps_give_the_times_of_steps_never_seen() -> None:
    model = true_model()
    fitted, quality = fit_step_time(steps_of(model, 300, 1))
    assert quality.median_error < 1e-6
    assert quality.r_squared > 0.9999
    unseen = quality_of(fitted, steps_of(model, 100, 2))
    assert unseen.p90_error < 1e-3


def test_steps_that_something_else_disturbed_change_little() -> None:
    model, rng = true_model(), random.Random(5)
    steps = [
        step._replace(seconds=step.seconds * (6 if rng.random() < 0.1 else 1)) for step in steps_of(model, 400, 3, 0.01)
    ]
    fitted, _ = fit_step_time(steps)
    unseen = quality_of(fitted, steps_of(model, 100, 4))
    assert abs(unseen.total_error) < 0.03
    assert unseen.p90_error < 0.06


def test_no_coefficient_is_negative_and_no_other_choice_is_better() -> None:
    rng = random.Random(11)
    for _ in range(30):
        count = rng.randrange(1, 6)
        rows = [[rng.gauss(0, 1) for _ in range(count)] for _ in range(12)]
        targets = [rng.gauss(0, 1) for _ in rows]
        weights = [rng.random() + 0.1 for _ in rows]
        found = solve_non_negative(rows, targets, weights)
        assert min(found) >= 0
        errors = [
            target - sum(value * row[idx] for idx, value in enumerate(found))
            for row, target in zip(rows, targets, strict=True)
        ]
        # Conditions of Karush, Kuhn and Tucker: no slope at a positive coefficient, and none upwards at 0.
        for idx, value in enumerate(found):
            slope = sum(weight * error * row[idx] for weight, error, row in zip(weights, errors, rows, strict=True))
            assert slope < 1e-7
            if value > 0:
                assert slope > -1e-7


def test_features_that_are_sums_of_others_do_no_harm() -> None:
    rng = random.Random(2)
    rows = [[1.0, value, 2 * value, value + 1] for value in (rng.random() for _ in range(30))]
    found = solve_non_negative(rows, [3 + 2 * row[1] for row in rows], [1.0] * 30)
    assert [sum(map(float.__mul__, found, row)) for row in rows] == pytest.approx([3 + 2 * row[1] for row in rows])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_steps_that_cannot_be_fitted_are_refused(seconds: float) -> None:
    steps = steps_of(true_model(), MIN_STEPS, 1)
    with pytest.raises(ConfigError, match="at least 30 steps, got 29"):
        fit_step_time(steps[1:])
    with pytest.raises(ConfigError, match="above 0"):
        fit_step_time([*steps, MeasuredStep(steps[0].parts, seconds)])


def test_all_features_are_fitted() -> None:
    fitted, _ = fit_step_time(steps_of(true_model(), 60, 1))
    assert set(fitted.coefficients) == set(FEATURES)
