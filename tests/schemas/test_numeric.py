"""Limits of numbers are moved inwards to what is enforced exactly, and never outwards."""

from __future__ import annotations

import json
from fractions import Fraction
from random import Random
from typing import Any

import pytest

from quire.sequences.structured import GrammarSource
from quire.text.schemas.document import SchemaError
from quire.text.schemas.forms import Number
from quire.text.schemas.numeric import MAX_INTEGER, common_multiple, enforceable, is_allowed


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (Number(True, -(2**63), 2**64), Number(True, -MAX_INTEGER, MAX_INTEGER)),
        (Number(True, 2**53 + 1, None), Number(True, 2**53 + 2, None)),
        (Number(True, None, 2**53 + 1), Number(True, None, 2**53)),
        (Number(True, 0.5, 9.5), Number(True, 1, 9)),
        (Number(True, 3, 5, is_above=True, is_below=True), Number(True, 4, 4)),
        (Number(True, 5.5, 5.7), None),
        (Number(True, 10**18, None), Number(True, 10**18, MAX_INTEGER)),
        (Number(False, 1e-300, 1e300, is_above=True), Number(False, 1e-30, 1e17)),
        (Number(False, -5e-324, None, is_above=True), Number(False, 0, None)),
        (Number(False, 3, 3, is_above=True), None),
        (Number(False, None, 3, constants=(1, 2.5, 4)), Number(constants=(1, 2.5))),
        (Number(True, constants=(2.5,)), None),
    ],
)
def test_limits_are_moved_inwards(number: Number, expected: Number | None) -> None:
    found = enforceable(number)
    assert found == expected
    for value in (0, 1, 2, 4, 9, 2**53, 2**53 + 2, 2.5, 1e-30, -1e-300, MAX_INTEGER):
        assert found is None or not is_allowed(found, value) or found.constants is not None or is_allowed(number, value)


@pytest.mark.parametrize(
    "number", [Number(True, 1e30), Number(False, 1e30), Number(constants=(2**53 + 1,)), Number(constants=(1e300,))]
)
def test_numbers_beyond_what_is_exact_are_refused(number: Number) -> None:
    with pytest.raises(SchemaError):
        enforceable(number)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([6, 4], 12), ([0.5, 0.75], 1.5), ([0.07], 0.07), ([1e-10], 1e-10), ([2.0], 2), ([0.29], 0.29), ([4.35], 4.35)],
)
def test_a_multiple_is_read_with_the_digits_that_were_written(values: list[float], expected: float) -> None:
    found = common_multiple(values)
    assert found is not None
    assert found == pytest.approx(expected, rel=1e-15)
    # As the compiler reads it.
    read, count = found, 0
    while read != int(read):
        read, count = read * 10, count + 1
    assert Fraction(int(read), 10**count) == Fraction(str(expected))


@pytest.mark.parametrize("value", [1e-300, 10**10, 12.123456789])
def test_a_multiple_of_many_digits_is_refused(value: float) -> None:
    with pytest.raises(SchemaError, match="has too many digits"):
        common_multiple([value])


@pytest.mark.parametrize(
    "limits",
    [
        {"minimum": -(2**63)}, {"maximum": 2**64, "minimum": 3}, {"multipleOf": 0.07}, {"minimum": 1e-320},
        {"exclusiveMinimum": 5e-324, "maximum": 1e300}, {"const": 2**53 + 2}, {"enum": [-(2**53), 0.1, 1e15]},
        {"minimum": 0.1, "maximum": 0.3, "multipleOf": 0.1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_that_are_written_are_within_the_limits(kind: str, limits: dict[str, Any]) -> None:
    walks = pytest.importorskip("tests.schemas.walks")
    schema = {"type": kind, **limits}
    if kind == "integer" and limits.get("multipleOf") == 0.1:
        with pytest.raises(ValueError, match="no value meets it"):
            walks.compiled(GrammarSource("json", json.dumps(schema)))
        return
    matcher = walks.compiled(GrammarSource("json", json.dumps(schema)))
    rng = Random(str(schema))
    for _ in range(20):
        text = walks.walk(matcher, rng)
        assert text is None or walks.is_valid(text, schema), text
