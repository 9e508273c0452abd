"""Models of the time of a step, which take the place of the data plane in a simulation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from quire.errors import ConfigError, shown


class StepItem(NamedTuple):
    """One sequence's share of a step.

    Args:
        start: number of cached tokens.
        num_pending: number of tokens to compute.
        num_read: number of the last computed tokens that go through the head.
        num_shared: number of cached tokens in blocks that an earlier sequence of the step has too.
    """

    start: int
    num_pending: int
    num_read: int
    num_shared: int = 0


def shared_tokens(tables: Sequence[tuple[Sequence[int], int]], block_size: int) -> list[int]:
    """Return the number of cached tokens of each sequence in blocks that an earlier sequence has too.

    An attention kernel can read such blocks once for all. Sequences share leading blocks only, so each is compared with
    the first and the last sequence before it that have the same first block.
    """
    first_blocks = [table[0] for table, num_cached in tables if num_cached]
    if len({*first_blocks}) == len(first_blocks):
        return [0] * len(tables)
    counts: list[int] = []
    # First block -> the first table with this block, and the last one so far.
    first_and_last: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
    for table, num_cached in tables:
        if not num_cached:
            counts.append(0)
            continue
        first = table[0]
        others = first_and_last.get(first)
        if others is None:
            first_and_last[first] = (table, table)
            counts.append(0)
        else:
            num_blocks = max(
                _num_common_blocks(table, other) for other in {id(earlier): earlier for earlier in others}.values()
            )
            first_and_last[first] = (others[0], table)
            counts.append(min(num_cached, num_blocks * block_size))
    return counts


def _num_common_blocks(table: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading blocks that two tables have in common, which is at least 1."""
    low, high = 1, min(len(table), len(other)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if table[low:middle] == other[low:middle] else (low, middle)
    return low


class StepTimeModel(Protocol):
    """A model of the seconds of a step, which depend on nothing but its items."""

    def of_step(self, parts: Sequence[StepItem]) -> float:
        """Return the seconds of a step, above 0."""

    def decode_ends(
        self, start_s: float, num_sequences: int, num_cached: int, num_shared: int, count: int
    ) -> list[float]:
        """Return the ends of consecutive steps in which each sequence computes one token.

        They equal, bit for bit, the results of adding the seconds of `of_step` to `start_s`, step by step.

        Args:
            start_s: start of the first step.
            num_sequences: number of sequences.
            num_cached: number of cached tokens of all sequences at the start.
            num_shared: sum of `StepItem.num_shared`, which is constant.
            count: number of steps.
        """

    @property
    def is_additive(self) -> bool:
        """True if a decoding step depends on the sum of the sequences' lengths only, as `decode_ends` requires.

        With windows of attention it does not, because a sequence's reads stop growing.
        """


# Rows up to the first bound cost the first rate, rows from there to the second bound the second rate, and so on.
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROW_NAMES = (*(f"rows_to_{bound}" for bound in ROW_BOUNDS), "rows_above")
FEATURES = ("step", *ROW_NAMES, "sequences", "read_tokens", "cached_tokens", "pairs")


def rows_in_ranges(num_rows: int) -> list[int]:
    """Return the number of rows of a step in each range of `ROW_BOUNDS`."""
    counts, before = [], 0
    for bound in ROW_BOUNDS:
        counts.append(max(0, min(num_rows, bound) - before))
        before = bound
    return [*counts, max(0, num_rows - before)]


def features_of(parts: Iterable[StepItem]) -> tuple[int, int, int, int, int]:
    """Return the number of rows, of sequences, of tokens to read, of cached tokens, and of pairs.

    A pair is a row and a visible token; a cached token that several sequences share is read once.
    """
    num_rows = num_sequences = num_read = num_cached = num_pairs = 0
    for start, count, _, num_shared in parts:
        num_sequences += 1
        num_rows += count
        num_read += start - num_shared
        num_cached += start
        num_pairs += count * start + count * (count + 1) // 2
    return num_rows, num_sequences, num_read, num_cached, num_pairs


@dataclass(frozen=True, slots=True)
class FittedStepTime:
    """Seconds as a sum of non-negative coefficients times features of a step.

    The cost of a row depends on the number of rows: few rows wait for the weights, many for the arithmetic. So the
    seconds of the rows are a rising, piecewise linear function with bends at `ROW_BOUNDS`.

    Args:
        coefficients: seconds per unit of each of `FEATURES`: a step, a row in each range, a sequence, a token to read,
            a cached token, a pair of a row and a visible token.
    """

    coefficients: Mapping[str, float]
    _rows_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        coefficients = self.coefficients
        if set(coefficients) != set(FEATURES):
            wrong = sorted(set(coefficients) ^ set(FEATURES))[0]
            raise ConfigError(f"step_times must have {', '.join(FEATURES)}, and {shown(wrong)} is amiss", field=wrong)
        for name, value in coefficients.items():
            if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be a number of seconds of at least 0, got {shown(value)}", field=name)
        if not coefficients["step"] + coefficients["rows_to_1"] > 0:
            raise ConfigError("step and rows_to_1 are both 0: a step of one row would take no time", field="step")
        # Seconds of a step and its rows at each bound.
        at_bounds, before = [coefficients["step"]], 0
        for bound, name in zip(ROW_BOUNDS, ROW_NAMES, strict=False):
            at_bounds.append(at_bounds[-1] + (bound - before) * coefficients[name])
            before = bound
        object.__setattr__(self, "_rows_s", tuple(at_bounds))

    @property
    def is_additive(self) -> bool:
        """True, because all features are sums over the sequences."""
        return True

    def of_step(self, parts: Sequence[StepItem]) -> float:
        """Return the seconds of a step."""
        num_rows, num_sequences, num_read, num_cached, num_pairs = features_of(parts)
        coefficients, fixed_s = self.coefficients, self._fixed_s(num_rows, num_sequences)
        lengths_s = (
            num_read * coefficients["read_tokens"]
            + num_cached * coefficients["cached_tokens"]
            + num_pairs * coefficients["pairs"]
        )
        return fixed_s + lengths_s

    def decode_ends(
        self, start_s: float, num_sequences: int, num_cached: int, num_shared: int, count: int
    ) -> list[float]:
        """Return the ends of consecutive steps of one token for each sequence."""
        coefficients, fixed_s = self.coefficients, self._fixed_s(num_sequences, num_sequences)
        read_s, cached_s, pair_s = coefficients["read_tokens"], coefficients["cached_tokens"], coefficients["pairs"]
        ends_s, end_s = [], start_s
        for cached in range(num_cached, num_cached + count * num_sequences, num_sequences):
            # The same operations in the same order as in `of_step`.
            lengths_s = (cached - num_shared) * read_s + cached * cached_s + (cached + num_sequences) * pair_s
            end_s += fixed_s + lengths_s
            ends_s.append(end_s)
        return ends_s

    def _fixed_s(self, num_rows: int, num_sequences: int) -> float:
        """Return the part of a step's seconds that does not depend on lengths."""
        coefficients = self.coefficients
        idx = bisect_left(ROW_BOUNDS, num_rows)
        before = ROW_BOUNDS[idx - 1] if idx else 0
        rows_s = self._rows_s[idx] + (num_rows - before) * coefficients[ROW_NAMES[idx]]
        return rows_s + num_sequences * coefficients["sequences"]

    def as_json(self) -> dict[str, Any]:
        """Return the coefficients as a JSON object."""
        return dict(self.coefficients)
