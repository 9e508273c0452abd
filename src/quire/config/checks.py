"""Checks of single values: each names the field, the value and what is allowed."""

from __future__ import annotations

from math import inf

from quire.errors import ConfigError, shown


def check_text(name: str, value: object, *, optional: bool = False) -> None:
    """Refuse a value that is no text, or empty."""
    if not (isinstance(value, str) and value) and not (optional and value is None):
        allowed = "a non-empty string" + (" or None" if optional else "")
        raise ConfigError(f"{name} must be {allowed}, got {shown(value)}", field=name)


def check_flag(name: str, value: object) -> None:
    """Refuse a value that is neither true nor false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {shown(value)}", field=name)


def check_whole(name: str, value: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    """Refuse a value that is no integer in `[low, high]`."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"an integer of at least {low}" + (f" and at most {high}" if high is not None else "")
        raise ConfigError(f"{name} must be {allowed}, got {shown(value)}", field=name)


def check_share(name: str, value: object, high: float, *, positive: bool = False) -> None:
    """Refuse a value that is no number from 0 (without 0, if `positive`) to `high`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0.0 <= value <= high
        or (positive and value == 0.0)
    ):
        allowed = f"above 0 and at most {high:g}" if positive else f"from 0 to {high:g}"
        raise ConfigError(f"{name} must be a number {allowed}, got {shown(value)}", field=name)


def check_positive(name: str, value: object, *, optional: bool = False) -> None:
    """Refuse a value that is no finite number above 0."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < inf:
        raise ConfigError(f"{name} must be a number above 0, got {shown(value)}", field=name)


def check_one_of(name: str, value: object, allowed: tuple[str, ...], *, optional: bool = False) -> None:
    """Refuse a value that is not among those allowed."""
    if value not in allowed and not (optional and value is None):
        words = f"one of {', '.join(allowed)}" + (" or None" if optional else "")
        raise ConfigError(f"{name} must be {words}, got {shown(value)}", field=name)
