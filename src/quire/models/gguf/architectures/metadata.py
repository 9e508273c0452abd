"""Typed reading of the metadata of a GGUF file: fields are checked, and messages name their keys."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError, UnsupportedModel, shown
from quire.models.families.hf_config import MAX_INTEGER

MAX_LAYERS = 1024


class Metadata:
    """The fields of one architecture."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._fields = fields
        self._architecture = architecture

    @property
    def num_blocks(self) -> int:
        """Number of layers in the file, including those for multi-token prediction."""
        return self.integer("block_count", most=MAX_LAYERS)

    def key(self, name: str) -> str:
        """Return the key of a field."""
        return f"{self._architecture}.{name}"

    def has(self, name: str) -> bool:
        """Return whether a field exists."""
        return self.key(name) in self._fields

    def require(self, name: str, *allowed: object) -> None:
        """Refuse a field whose value is none of `allowed`; a missing field passes."""
        if self.has(name) and self._fields[self.key(name)] not in allowed:
            raise UnsupportedModel(
                f"the field {self.key(name)} is {shown(self._fields[self.key(name)])}, but only "
                f"{' or '.join(map(repr, allowed))} is implemented for {self._architecture}",
                field=self.key(name),
            )

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_INTEGER) -> int:
        """Read an integer."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, value, f"an integer from {least} to {most}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Read an integer of at least 0 for each layer; a single number applies to all layers."""
        value, count = self._get(name, None), self.num_blocks
        values = value if isinstance(value, list | tuple) else [value] * count
        if len(values) != count or not all(type(item) is int and 0 <= item <= MAX_INTEGER for item in values):
            raise self.wrong(name, value, f"an integer from 0 to {MAX_INTEGER}, or {count} of them")
        return tuple(values)

    def same_integer(self, name: str) -> int:
        """Read a positive integer that is the same in all layers."""
        values = set(self.integers(name))
        if len(values) != 1:
            raise UnsupportedModel(
                f"the field {self.key(name)} gives layers {shown(sorted(values))}, but only one number for all layers "
                f"is implemented for {self._architecture}",
                field=self.key(name),
            )
        value = values.pop()
        if value < 1:
            raise self.wrong(name, value, "at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a positive number, as the shortest decimal number of its float32."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, value, "a positive number")
        return shortest(float(value))

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Read a list of `count` numbers, which may be negative and infinite."""
        value = self._get(name, None)
        if not isinstance(value, list | tuple) or len(value) != count or not all(map(_is_number, value)):
            raise self.wrong(name, value, f"a list of {count} numbers")
        return tuple(map(float, value))

    def sections(self, name: str) -> tuple[int, int, int]:
        """Read the numbers of frequencies of time, rows and columns; a fourth number must be 0."""
        value = self._get(name, None)
        counts = list(value) if isinstance(value, list | tuple) else []
        if not all(type(count) is int and 0 <= count <= MAX_INTEGER for count in counts) or (
            len(counts) != 3 and (len(counts) != 4 or counts[3] != 0)
        ):
            raise self.wrong(name, value, "three whole numbers, and 0")
        return counts[0], counts[1], counts[2]

    def flags(self, name: str, count: int) -> tuple[bool, ...]:
        """Read a list of `count` flags; a missing field has none that is set."""
        value = self._get(name, [False] * count)
        if not isinstance(value, list | tuple) or len(value) != count or not all(flag in (0, 1) for flag in value):
            raise self.wrong(name, value, f"a list of {count} flags")
        return tuple(map(bool, value))

    def number_or_none(self, name: str) -> float | None:
        """Read a positive number; None for a missing field and for 0."""
        value = self._fields.get(self.key(name))
        return None if value is None or value == 0 else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def window_pattern(self, default: int) -> tuple[bool, ...]:
        """Return whether each layer has a window, from a list or from the period of the layers without one."""
        name, count = "attention.sliding_window_pattern", self.num_blocks
        value = self._get(name, default)
        if type(value) is int and value > 0:
            return tuple((idx + 1) % value > 0 for idx in range(count))
        if isinstance(value, list | tuple) and len(value) == count and all(flag in (0, 1) for flag in value):
            return tuple(map(bool, value))
        raise self.wrong(name, value, f"a period or {count} flags")

    def text(self, name: str, default: str) -> str:
        """Read a string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def wrong(self, name: str, value: object, allowed: str) -> CheckpointError:
        """Return the error for a field whose value is not allowed."""
        key = self.key(name)
        return CheckpointError(f"the field {key} must be {allowed}, got {shown(value)}", field=key)

    def _get(self, name: str, default: object) -> object:
        value = self._fields.get(self.key(name), default)
        if value is None:
            raise CheckpointError(f"the field {self.key(name)} is missing", field=self.key(name))
        return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def shortest(value: float) -> float:
    """Return the shortest decimal number with the same float32: the value of the configuration before conversion.

    A value that is not a float32 is returned unchanged.
    """
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", stored)[0] != value:
        return value
    decimals = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next(decimal for decimal in decimals if struct.pack("<f", decimal) == stored)
