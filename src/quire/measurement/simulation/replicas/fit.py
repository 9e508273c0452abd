"""Fits the seconds of a step to measured steps: least squares of relative errors, with coefficients of at least 0."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from quire.errors import ConfigError, shown
from quire.measurement.simulation.replicas.step_time import (
    FEATURES,
    FittedStepTime,
    StepItem,
    features_of,
    rows_in_ranges,
)

MIN_STEPS = 30
# Number of rounds in which outliers (steps that something else slowed down) lose weight, and the ratio of an outlier's
# error to the median.
NUM_ROUNDS = 8
LARGE_ERROR = 2.5
# Errors of a fit beyond which its predictions are not to be trusted.
MAX_TOTAL_ERROR = 0.1
MAX_MEDIAN_ERROR = 0.2
MIN_R_SQUARED = 0.9
WARNING = (
    "Warning: these errors are large, and predicted times are off by as much or more: measure again on a machine that "
    "does nothing else, with the number of threads that will serve"
)


class MeasuredStep(NamedTuple):
    """The parts of a step, and its seconds."""

    parts: Sequence[StepItem]
    seconds: float


class FitQuality(NamedTuple):
    """The errors of a fit, relative to the measured seconds of each step.

    Args:
        num_steps: number of steps.
        median_error, p90_error: percentiles of the absolute relative errors.
        total_error: relative error of the sum of all steps; above 0 if the fit is too slow.
        r_squared: share of the variance of the seconds that is explained by the fit.
    """

    num_steps: int
    median_error: float
    p90_error: float
    total_error: float
    r_squared: float

    @classmethod
    def read(cls, fields: object) -> FitQuality:
        """Read the errors from the fields of a file.

        Raises:
            ConfigError: a field is missing, or no number.
        """
        values = [fields.get(name) if isinstance(fields, dict) else None for name in cls._fields]
        for name, value in zip(cls._fields, values, strict=True):
            if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
                raise ConfigError(f"fit: {name} must be a number, got {shown(value)}", field="fit")
        return cls(*values)  # type: ignore[arg-type]

    @property
    def is_large(self) -> bool:
        """True if predictions from the fit are not to be trusted."""
        is_far = abs(self.total_error) > MAX_TOTAL_ERROR or self.median_error > MAX_MEDIAN_ERROR
        return is_far or self.r_squared < MIN_R_SQUARED

    def lines(self) -> list[str]:
        """Return the errors as text, with a warning if they are large."""
        line = (
            f"{self.num_steps:,} steps; error of a step: median {100 * self.median_error:.1f}%, 90th percentile "
            f"{100 * self.p90_error:.1f}%; of all together {100 * self.total_error:+.1f}%; "
            f"{100 * self.r_squared:.1f}% of the variance explained"
        )
        return [line, *((WARNING,) if self.is_large else ())]


def fit_step_time(steps: Sequence[MeasuredStep]) -> tuple[FittedStepTime, FitQuality]:
    """Return the model that fits measured steps best, and the quality of the fit."""
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"a fit needs at least {MIN_STEPS} steps, got {len(steps)}", field="step_times")
    wrong = next((step.seconds for step in steps if not step.seconds > 0), None)
    if wrong is not None:
        raise ConfigError(f"seconds of a step must be above 0, got {wrong}", field="step_times")
    rows = []
    for parts, seconds in steps:
        num_rows, *others = features_of(parts)
        rows.append([value / seconds for value in (1, *rows_in_ranges(num_rows), *others)])
    weights = [1.0] * len(rows)
    coefficients: list[float] = []
    for _ in range(NUM_ROUNDS):
        coefficients = solve_non_negative(rows, [1.0] * len(rows), weights)
        errors = [abs(sum(map(float.__mul__, coefficients, map(float, row))) - 1) for row in rows]
        limit = LARGE_ERROR * max(statistics.median(errors), 1e-9)
        weights = [min(1.0, limit / error) if error else 1.0 for error in errors]
    model = FittedStepTime(dict(zip(FEATURES, coefficients, strict=True)))
    return model, quality_of(model, steps)


def quality_of(model: FittedStepTime, steps: Sequence[MeasuredStep]) -> FitQuality:
    """Return the errors of a model on measured steps."""
    fitted = [model.of_step(step.parts) for step in steps]
    measured = [step.seconds for step in steps]
    errors = sorted(abs(mine / theirs - 1) for mine, theirs in zip(fitted, measured, strict=True))
    mean = statistics.fmean(measured)
    residue = sum((mine - theirs) ** 2 for mine, theirs in zip(fitted, measured, strict=True))
    spread = sum((theirs - mean) ** 2 for theirs in measured)
    return FitQuality(
        num_steps=len(steps),
        median_error=errors[len(errors) // 2],
        p90_error=errors[len(errors) * 9 // 10],
        total_error=sum(fitted) / sum(measured) - 1,
        r_squared=1 - residue / spread if spread else 0.0,
    )


def solve_non_negative(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return the non-negative coefficients with the least weighted sum of squared errors.

    Source: Lawson and Hanson, Solving Least Squares Problems, chapter 23, on the normal equations.
    """
    count = len(rows[0])
    # Columns are scaled to length 1, since features differ by orders of magnitude.
    lengths = [
        sum(weight * row[idx] ** 2 for row, weight in zip(rows, weights, strict=True)) ** 0.5 or 1.0
        for idx in range(count)
    ]
    scaled = [[value / length for value, length in zip(row, lengths, strict=True)] for row in rows]
    gram = [[0.0] * count for _ in range(count)]
    wanted = [0.0] * count
    for row, target, weight in zip(scaled, targets, weights, strict=True):
        for idx, value in enumerate(row):
            if value:
                wanted[idx] += weight * value * target
                for other in range(count):
                    gram[idx][other] += weight * value * row[other]
    free: list[int] = []
    solution = [0.0] * count
    while len(free) < count:
        slopes = [wanted[idx] - sum(map(float.__mul__, gram[idx], solution)) for idx in range(count)]
        best = max((idx for idx in range(count) if idx not in free), key=slopes.__getitem__)
        if slopes[best] <= 1e-9:
            break
        free.append(best)
        while True:
            chosen = _solve([[gram[idx][other] for other in free] for idx in free], [wanted[idx] for idx in free])
            if chosen is None:
                # The last feature is linearly dependent on the others, so it adds nothing.
                solution[free.pop()] = 0.0
                return [value / length for value, length in zip(solution, lengths, strict=True)]
            if min(chosen) > 0:
                break
            steps = [
                solution[idx] / (solution[idx] - value) for idx, value in zip(free, chosen, strict=True) if value <= 0
            ]
            step = min(steps)
            for idx, value in zip(free, chosen, strict=True):
                solution[idx] += step * (value - solution[idx])
            free = [idx for idx in free if solution[idx] > 1e-12]
            solution = [value if idx in free else 0.0 for idx, value in enumerate(solution)]
            if not free:
                return [0.0] * count
        for idx, value in zip(free, chosen, strict=True):
            solution[idx] = value
    return [value / length for value, length in zip(solution, lengths, strict=True)]


def _solve(matrix: list[list[float]], wanted: list[float]) -> list[float] | None:
    """Return the solution of linear equations by elimination; None if the matrix is singular."""
    count = len(wanted)
    rows = [[*row, value] for row, value in zip(matrix, wanted, strict=True)]
    for idx in range(count):
        pivot = max(range(idx, count), key=lambda other: abs(rows[other][idx]))
        if abs(rows[pivot][idx]) < 1e-11:
            return None
        rows[idx], rows[pivot] = rows[pivot], rows[idx]
        for other in range(idx + 1, count):
            factor = rows[other][idx] / rows[idx][idx]
            if factor:
                rows[other] = [mine - factor * theirs for mine, theirs in zip(rows[other], rows[idx], strict=True)]
    solution = [0.0] * count
    for idx in reversed(range(count)):
        partial_sum = sum(rows[idx][other] * solution[other] for other in range(idx + 1, count))
        solution[idx] = (rows[idx][count] - partial_sum) / rows[idx][idx]
    return solution
