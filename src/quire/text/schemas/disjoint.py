"""A conservative test whether forms have no common value."""

from __future__ import annotations

from quire.text.schemas.forms import NEVER, Anything, Array, Boolean, Form, Number, Object, State, Text
from quire.text.schemas.numeric import is_allowed
from quire.text.schemas.states import States

MAX_DEPTH = 4


def are_disjoint(one: Form, other: Form, states: States, depth: int = 0) -> bool:
    """Return True if no value has both forms; False if some value may."""
    if isinstance(one, Anything) or isinstance(other, Anything) or depth > MAX_DEPTH:
        return False
    if type(one) is not type(other):
        return True
    if isinstance(one, Boolean) and isinstance(other, Boolean):
        return not set(one.values) & set(other.values)
    if isinstance(one, Number) and isinstance(other, Number):
        return _numbers(one, other) or _numbers(other, one)
    if isinstance(one, Text) and isinstance(other, Text):
        return _texts(one, other) or _texts(other, one)
    if isinstance(one, Array) and isinstance(other, Array):
        return _lengths(one, other) or _lengths(other, one) or _items(one, other, states, depth)
    if isinstance(one, Object) and isinstance(other, Object):
        return _members(one, other, states, depth) or _members(other, one, states, depth)
    return False


def _numbers(one: Number, other: Number) -> bool:
    if one.constants is not None:
        return not any(
            is_allowed(other, value) and (other.constants is None or value in other.constants)
            for value in one.constants
        )
    if one.maximum is None or other.minimum is None:
        return False
    return one.maximum < other.minimum or (one.maximum == other.minimum and (one.is_below or other.is_above))


def _texts(one: Text, other: Text) -> bool:
    if one.constants is not None and other.constants is not None:
        return not set(one.constants) & set(other.constants)
    if one.constants is not None:
        return all(_is_length(other, len(text)) is False for text in one.constants)
    return one.max_length is not None and one.max_length < other.min_length


def _is_length(text: Text, length: int) -> bool:
    return text.min_length <= length and (text.max_length is None or length <= text.max_length)


def _lengths(one: Array, other: Array) -> bool:
    return one.max_items is not None and one.max_items < other.min_items


def _items(one: Array, other: Array, states: States, depth: int) -> bool:
    """Return whether an item that one of the arrays must have has disjoint states."""
    length = min(max(one.min_items, other.min_items), max(len(one.prefix), len(other.prefix)) + 1)
    pairs = [(_item(one, idx), _item(other, idx)) for idx in range(length)]
    return any(_states(a, b, states, depth) for a, b in pairs)


def _item(array: Array, idx: int) -> State:
    return array.prefix[idx] if idx < len(array.prefix) else array.items


def _members(one: Object, other: Object, states: States, depth: int) -> bool:
    """Return whether a required property of the first object has disjoint states in the two objects."""
    return any(_states(_member(one, name), _member(other, name), states, depth) for name in one.required)


def _member(form: Object, name: str) -> State | None:
    """Return the state of a property; None if it may depend on a pattern."""
    declared = dict(form.properties)
    if name in declared:
        return declared[name]
    return form.additional if not form.patterns and form.names is None else None


def _states(one: State | None, other: State | None, states: States, depth: int) -> bool:
    if NEVER in (one, other):
        return True
    if one is None or other is None:
        return False
    pairs = [(a, b) for a in states.forms(one) for b in states.forms(other)]
    return all(are_disjoint(a, b, states, depth + 1) for a, b in pairs)
