"""Typed access to the fields of a JSON object; `null` is the same as absent, as in OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quire.config.hints import hint_for
from quire.errors import InvalidParameter, UnsupportedFeature

logger = logging.getLogger(__name__)

# Topics of warnings that were logged; clients may send any number of unknown names, of any length.
_warned: set[str] = set()
MAX_WARNED = 256
MAX_NAME = 64


def warn_once(topic: str, message: str, *args: object) -> None:
    """Log a warning, once for each topic."""
    if topic not in _warned and len(_warned) < MAX_WARNED:
        _warned.add(topic)
        logger.warning(message, *args)


# The neutral values of a field, and the reason why all others are refused.
Refusal = tuple[tuple[Any, ...], str]


@dataclass(frozen=True)
class RouteFields:
    """The fields of a route's body: each is honoured, or refused by name, or changes no answer.

    Args:
        honoured: names of the fields that the route reads.
        refused: fields of which only the neutral values are accepted.
        neutral: fields without effect, with the reason.
        objects: names of objects in the body, whose fields are named `OBJECT.FIELD`.
    """

    honoured: tuple[str, ...]
    refused: Mapping[str, Refusal]
    neutral: Mapping[str, str]
    objects: tuple[str, ...] = ()

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all fields."""
        return frozenset((*self.honoured, *self.refused, *self.neutral))

    @cached_property
    def inner(self) -> Mapping[str, RouteFields]:
        """The fields of the objects, by the object's name."""
        return {name: self._of(f"{name}.") for name in self.objects}

    def _of(self, prefix: str) -> RouteFields:
        """Return the fields with a prefix, without it."""
        return RouteFields(
            tuple(name.removeprefix(prefix) for name in self.honoured if name.startswith(prefix)),
            {name.removeprefix(prefix): refusal for name, refusal in self.refused.items() if name.startswith(prefix)},
            {name.removeprefix(prefix): why for name, why in self.neutral.items() if name.startswith(prefix)},
        )


class Fields:
    """A JSON object with typed access to its fields."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def name(self, field: str) -> str:
        """Return a field's full name."""
        return self._path + field

    def get(self, field: str) -> Any:
        """Return a field's value, None when it is absent or null."""
        return self._values.get(field)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole object."""
        return dict(self._values)

    def flag(self, field: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidParameter(self.name(field), value, "true or false")
        return value

    def text(self, field: str) -> str | None:
        """Return a string, None when absent."""
        value = self.get(field)
        if value is not None and not isinstance(value, str):
            raise InvalidParameter(self.name(field), value, "a string")
        return value

    def integer(self, field: str, low: int, high: int) -> int | None:
        """Return an integer of `[low, high]`, None when absent."""
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidParameter(self.name(field), value, f"an integer from {low} to {high}")
        return value

    def object(self, field: str) -> Fields | None:
        """Return an inner object, None when absent."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InvalidParameter(self.name(field), value, "an object")
        return Fields(value, f"{self.name(field)}.")

    def check(self, known: RouteFields) -> None:
        """Refuse the fields of a body that are refused, and warn of unknown ones."""
        self.refuse(known.refused)
        self.log_unknown(known.names)
        for name, fields in known.inner.items():
            inner = self.object(name)
            if inner is not None:
                inner.check(fields)

    def refuse(self, unsupported: Mapping[str, Refusal]) -> None:
        """Refuse every field of the table that has another value than its neutral ones."""
        for field, value in self._values.items():
            if field not in unsupported or value is None:
                continue
            neutral, why = unsupported[field]
            # The type counts too: 0 and False are equal in Python.
            if not any(value == same and type(value) is type(same) for same in neutral):
                raise UnsupportedFeature(self.name(field), why)

    def log_unknown(self, field_names: Iterable[str]) -> None:
        """Warn of unknown fields, once a name; clients send new fields before servers know them, so none is refused."""
        names = frozenset(field_names)
        for field in sorted(self._values.keys() - names - _warned)[: MAX_WARNED - len(_warned)]:
            short = field[:MAX_NAME]
            warn_once(field, "ignored the unknown field %r%s", self.name(short), hint_for(short, {}, names))
