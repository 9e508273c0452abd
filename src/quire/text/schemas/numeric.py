"""Limits of numbers that `llguidance` enforces exactly.

`llguidance` reads limits as float64, and integers as 64 bits. A limit without an exact value is moved inwards to the
next exact one: this allows fewer numbers, but none that the schema forbids. Numbers are written without an exponent, so
their digits are bounded too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

from quire.text.schemas.document import SchemaError
from quire.text.schemas.forms import Number

# Greatest float64 below 2**63.
MAX_INTEGER = 2**63 - 2**10
# Integers with as many digits can exceed 64 bits, so a range from here on needs a limit on both sides.
LARGE_INTEGER = 10**18
MAX_NUMBER, MIN_NUMBER = 1e17, 1e-30
# Constants in this range are written without an exponent.
MAX_CONSTANT, MIN_CONSTANT = 1e15, 1e-6
MAX_COEFFICIENT = 2**32 - 1


def enforceable(number: Number) -> Number | None:
    """Return a number with exact limits; None if no number is within them."""
    if number.constants is not None:
        constants = tuple(one for one in number.constants if is_allowed(number, one))
        for one in constants:
            _check_constant(one)
        return Number(constants=constants) if constants else None
    if number.is_integer:
        return _integer(number)
    low, high = _lower(number.minimum), _upper(number.maximum)
    exact = replace(
        number,
        minimum=low,
        maximum=high,
        is_above=number.is_above and low == number.minimum,
        is_below=number.is_below and high == number.maximum,
    )
    return None if _is_empty(exact) else exact


def is_allowed(number: Number, value: float) -> bool:
    """Return whether a value is within the limits and a multiple of the divisor."""
    low, high = number.minimum, number.maximum
    return (
        (not number.is_integer or value == int(value))
        and (low is None or value > low or (value == low and not number.is_above))
        and (high is None or value < high or (value == high and not number.is_below))
        and (number.multiple is None or (_exact(value) / _exact(number.multiple)).denominator == 1)
    )


def common_multiple(values: Sequence[float]) -> float | None:
    """Return the least common multiple of decimals; None for no values.

    `llguidance` reads the digits of the returned float64 exactly.
    """
    if not values:
        return None
    exact = [_exact(value) for value in values]
    numerator = math.lcm(*(one.numerator for one in exact))
    whole = Fraction(numerator, math.gcd(*(one.denominator for one in exact)))
    if whole.denominator == 1 and whole.numerator <= MAX_COEFFICIENT:
        return whole.numerator
    for candidate in _neighbours(float(whole)) if whole <= MAX_COEFFICIENT else ():
        if _as_read(candidate) == whole:
            return candidate
    raise SchemaError(f"{' and '.join(map(str, values))} has too many digits")


def _integer(number: Number) -> Number | None:
    low = None if number.minimum is None else math.ceil(number.minimum)
    high = None if number.maximum is None else math.floor(number.maximum)
    low = low + 1 if low is not None and number.is_above and low == number.minimum else low
    high = high - 1 if high is not None and number.is_below and high == number.maximum else high
    if (low is not None and low > MAX_INTEGER) or (high is not None and high < -MAX_INTEGER):
        raise SchemaError("integers of more than 64 bits cannot be compared")
    low = None if low is None else int(_rounded(max(low, -MAX_INTEGER), math.inf))
    high = None if high is None else int(_rounded(min(high, MAX_INTEGER), -math.inf))
    if low is not None and low >= LARGE_INTEGER and high is None:
        high = MAX_INTEGER
    if high is not None and high <= -LARGE_INTEGER and low is None:
        low = -MAX_INTEGER
    exact = Number(True, low, high, multiple=number.multiple)
    return None if _is_empty(exact) else exact


def _lower(limit: float | None) -> float | None:
    """Return the lowest enforceable limit that is not below `limit`."""
    if limit is None:
        return None
    if limit > MAX_NUMBER:
        raise SchemaError(f"only numbers up to {MAX_NUMBER:g} can be compared")
    if 0 < limit < MIN_NUMBER:
        return MIN_NUMBER
    return 0 if -MIN_NUMBER < limit < 0 else _rounded(max(limit, -MAX_NUMBER), math.inf)


def _upper(limit: float | None) -> float | None:
    low = _lower(None if limit is None else -limit)
    return None if low is None else -low


def _rounded(limit: float, towards: float) -> float:
    """Return the limit itself if it is a float64, else the next float64 in a direction."""
    rounded = float(limit)
    is_inward = rounded >= limit if towards > 0 else rounded <= limit
    return limit if rounded == limit else rounded if is_inward else math.nextafter(rounded, towards)


def _is_empty(number: Number) -> bool:
    low, high = number.minimum, number.maximum
    if low is None or high is None:
        return False
    return low > high or (low == high and (number.is_above or number.is_below))


def _check_constant(value: float) -> None:
    is_whole = value == int(value)
    if is_whole and abs(value) <= MAX_INTEGER and int(float(value)) == value:
        return
    if is_whole or not MIN_CONSTANT <= abs(value) < MAX_CONSTANT:
        raise SchemaError(f"the number {value} has too many digits")


def _exact(value: float) -> Fraction:
    """Return the exact value of a number's decimal notation."""
    return Fraction(Decimal(str(value)))


def _neighbours(value: float) -> Iterable[float]:
    below = above = value
    yield value
    for _ in range(4):
        below, above = math.nextafter(below, 0), math.nextafter(above, math.inf)
        yield from (below, above)


def _as_read(value: float) -> Fraction | None:
    """Return a float64's value as `llguidance` reads it, by repeated multiplication; None for too many digits."""
    count = 0
    while value != int(value):
        value *= 10
        count += 1
    return Fraction(int(value), 10**count) if value <= MAX_COEFFICIENT else None
