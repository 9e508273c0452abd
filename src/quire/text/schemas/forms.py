"""The normal form of a schema: states, each with the forms that a value may have.

A state is a conjunction of parts of a schema. Its forms are its alternatives, each of one type, with the restrictions
of all parts; items and members of a form are states again. So there are no references, `allOf`, `anyOf` or conditions,
and recursive schemas are states that refer to themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Number of a state in `NormalSchema.states`. The first two are fixed.
State = int
ANY: State = 0
NEVER: State = 1


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value; the only form of its state."""


@dataclass(frozen=True, slots=True)
class Null:
    """The value null."""


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false.

    Args:
        values: allowed values.
    """

    values: tuple[bool, ...] = (True, False)


@dataclass(frozen=True, slots=True)
class Number:
    """A number.

    Args:
        is_integer: True for integers.
        minimum, maximum: limits, or None.
        is_above, is_below: True if the minimum or maximum itself is not allowed.
        multiple: divisor of the number, or None.
        constants: allowed numbers; None for any.
    """

    is_integer: bool = False
    minimum: float | None = None
    maximum: float | None = None
    is_above: bool = False
    is_below: bool = False
    multiple: float | None = None
    constants: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A string.

    Args:
        min_length, max_length: limits of the number of characters; `max_length` may be None.
        patterns: regular expressions in Rust's syntax, which all match the whole string.
        constants: allowed strings; None for any.
    """

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    constants: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Array:
    """An array.

    Args:
        prefix: states of the first items.
        items: state of all further items.
        min_items, max_items: limits of the number of items; `max_items` may be None.
    """

    prefix: tuple[State, ...] = ()
    items: State = ANY
    min_items: int = 0
    max_items: int | None = None


@dataclass(frozen=True, slots=True)
class Object:
    """An object.

    Args:
        properties: state of each declared property, in order.
        required: names of the required properties.
        patterns: states of the properties whose whole name matches a regular expression, in Rust's syntax.
        additional: state of all other properties.
        names: form of the names of properties that are not declared; None for any.
        min_others, max_others: limits of the number of properties that are not declared; `max_others` may be None.
    """

    properties: tuple[tuple[str, State], ...] = ()
    required: tuple[str, ...] = ()
    patterns: tuple[tuple[str, State], ...] = ()
    additional: State = ANY
    names: Text | None = None
    min_others: int = 0
    max_others: int | None = None


Form = Anything | Null | Boolean | Number | Text | Array | Object


class Dropped(NamedTuple):
    """A keyword that was left out because it cannot be enforced.

    Args:
        path: path of the part with the keyword, "" for the root.
        keyword: name of the keyword.
        reason: reason why it cannot be enforced.
    """

    path: str
    keyword: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}{': ' if self.path else ''}{self.keyword} cannot be enforced, since {self.reason}"


class NormalSchema(NamedTuple):
    """A schema in normal form.

    Args:
        root: state of the whole value.
        states: forms of each state; empty if no value meets it.
        dropped: keywords that are left out.
    """

    root: State
    states: Sequence[tuple[Form, ...]]
    dropped: tuple[Dropped, ...] = ()

    def forms(self, state: State) -> tuple[Form, ...]:
        """Return the forms of a state."""
        return self.states[state]
