"""Checks of single options; each error names the field, the value and the allowed values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field, fields
from math import inf
from types import MappingProxyType
from typing import Any, Final

from quire.errors import ConfigError, shown

UNITS: Final = {"": 1, "B": 1} | {
    unit: base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in ((letter, 1000), (letter + "B", 1000), (letter + "IB", 1024))
}


# Metadata of the field of an option for which each rank of a model may have a value of its own. Ranks compare all other
# options when they join; of an option that is `GIVEN_ALIKE`, they compare whether it is given.
OWN: Final = {"ranks": "own"}
GIVEN_ALIKE: Final = {"ranks": "given"}


def check_text(name: str, value: object, *, optional: bool = False) -> None:
    """Refuse a value that is not a string, or is empty."""
    if not (isinstance(value, str) and value) and not (optional and value is None):
        allowed = "a non-empty string" + (" or None" if optional else "")
        raise ConfigError(f"{name} must be {allowed}, got {shown(value)}", field=name)


def check_flag(name: str, value: object) -> None:
    """Refuse a value that is not a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {shown(value)}", field=name)


def check_whole(name: str, value: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    """Refuse a value that is not an integer in `[low, high]`."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"an integer of at least {low}" + (f" and at most {high}" if high is not None else "")
        raise ConfigError(f"{name} must be {allowed}, got {shown(value)}", field=name)


def check_share(name: str, value: object, high: float, *, positive: bool = False) -> None:
    """Refuse a value that is not a number from 0 (excluded if `positive`) to `high`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0.0 <= value <= high
        or (positive and value == 0.0)
    ):
        allowed = f"above 0 and at most {high:g}" if positive else f"from 0 to {high:g}"
        raise ConfigError(f"{name} must be a number {allowed}, got {shown(value)}", field=name)


def check_positive(name: str, value: object, *, optional: bool = False, allows_zero: bool = False) -> None:
    """Refuse a value that is not a finite number above 0, or 0 if `allows_zero`."""
    if optional and value is None:
        return
    is_zero = allows_zero and value == 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not (is_zero or 0.0 < value < inf):
        allowed = "of at least 0" if allows_zero else "above 0"
        raise ConfigError(f"{name} must be a number {allowed}, got {shown(value)}", field=name)


def check_choices(config: Any) -> None:
    """Refuse a value that is not among the choices of its field; None is allowed if it is the default."""
    for item in fields(config):
        allowed, value = item.metadata.get("choices"), getattr(config, item.name)
        if allowed is not None and value not in allowed and not (value is None is item.default):
            words = f"one of {', '.join(allowed)}" + (" or None" if item.default is None else "")
            note = f": {item.metadata['note']}" if "note" in item.metadata else ""
            raise ConfigError(f"{item.name} must be {words}, got {shown(value)}{note}", field=item.name)


def check_served(options: Mapping[str, Any], served: Mapping[str, tuple[tuple[Any, ...], str]], where: str) -> None:
    """Refuse options with values that are not supported together with `where`, such as an option."""
    for name, (values, why) in served.items():
        if options[name] not in values:
            words = " or ".join(repr(value) for value in values)
            raise ConfigError(f"{name} must be {words} with {where}, got {options[name]!r}: {why}", field=name)


def parse_size(text: str) -> int:
    """Parse a number of bytes: `4G` is 4,000,000,000 and `4GiB` is 4,294,967,296."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{shown(text)} is not a size; write bytes, or a number with K, M, G, KiB, MiB, GiB")
    number, unit = match[1], UNITS[match[2].upper()]
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def put_path(config: Any, name: str, *, optional: bool = False) -> None:
    """Check a name or a path, and replace a `pathlib.Path` by its text."""
    value = getattr(config, name)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
        object.__setattr__(config, name, value)
    check_text(name, value, optional=optional)


def put_size(config: Any, name: str, low: int, *, optional: bool = False) -> None:
    """Check a number of bytes, and replace a text such as "4GiB" by an integer."""
    value = getattr(config, name)
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}", field=name) from error
        object.__setattr__(config, name, value)
    elif isinstance(value, float):
        raise ConfigError(f'{name} must be whole bytes, or a text such as "4GiB", got {shown(value)}', field=name)
    check_whole(name, value, low, optional=optional)


def choice(default: str, allowed: tuple[str, ...], ranks: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Return a field with a fixed set of values, for `check_choices` and `--help`; `ranks` is empty, or `OWN`."""
    return field(default=default, metadata={"choices": allowed, **ranks})
