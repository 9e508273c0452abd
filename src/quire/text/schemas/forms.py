"""The normal form of a schema: states, each with the forms that a value may have.

A state is the conjunction of some parts of a schema. Its forms are its alternatives, each of one type, with all that
the parts say of it; the parts of a form (items, members) are states again. So references, `allOf`, `anyOf`, conditions
and their neighbours are all gone, and recursive schemas are states that lead back to themselves.
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
    """Any value; no other form is beside it."""


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
        is_integer: True where it has no fraction.
        minimum, maximum: limits, None for none.
        is_above, is_below: True where the limit itself is not allowed.
        multiple: number that it is a multiple of.
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
        min_length, max_length: limits of the number of characters; None for none.
        patterns: regular expressions in Rust's syntax, each of which matches the whole string.
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
        items: state of the others.
        min_items, max_items: limits of their number; None for none.
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
        required: names of the properties that must be there.
        patterns: states of the properties whose whole name a regular expression matches, in Rust's syntax.
        additional: state of all other properties.
        names: form of the names of properties that are not declared; None for any.
        min_others, max_others: limits of the number of properties that are not declared; None for none.
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
    """A keyword that cannot be enforced, and is left out.

    Args:
        place: place of the part that has it, "" for the root.
        keyword: name of the keyword.
        reason: reason why it cannot be enforced.
    """

    place: str
    keyword: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}{': ' if self.place else ''}{self.keyword} cannot be enforced, since {self.reason}"


class NormalSchema(NamedTuple):
    """A schema in normal form.

    Args:
        root: state of the whole value.
        states: forms of each state; none where no value meets it.
        dropped: keywords that are left out.
    """

    root: State
    states: Sequence[tuple[Form, ...]]
    dropped: tuple[Dropped, ...] = ()

    def forms(self, state: State) -> tuple[Form, ...]:
        """Return the forms of a state."""
        return self.states[state]
