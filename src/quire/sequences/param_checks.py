"""Checks of sampling parameters; each returns the normalised value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import InvalidParameter
from quire.sequences.strategy import Strategy

MAX_STRINGS = 64
MAX_STRING_CHARS = 1024
MAX_LOGIT_BIAS = 1024


def integer(name: str, value: object, low: int, high: int) -> int:
    """Return an integer within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(name, value, f"an integer from {low} to {high}")
    return value


def number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """Return a number within bounds as a float; with `open_low`, the lower bound is excluded."""
    allowed = f"a number {'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(name, value, allowed)
    # Compared before the conversion: an integer may be too large for a float. NaN compares as False.
    if not low <= value <= high or (open_low and value == low):
        raise InvalidParameter(name, value, allowed)
    return float(value)


def token_ids(name: str, value: object, limit: int) -> tuple[int, ...]:
    """Return token ids, at most `limit` of them; a set is sorted."""
    allowed = f"a list of token ids (integers from 0), at most {limit}"
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidParameter(name, value, allowed)
    if len(value) > limit:
        raise InvalidParameter(name, f"{len(value)} ids", allowed)
    # Compiled loops first, since most lists are valid.
    if not {*map(type, value)} <= {int} or not 0 <= min(value, default=0) <= max(value, default=0) < 2**31:
        for token_id in value:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
                raise InvalidParameter(name, token_id, allowed)
    return tuple(value) if isinstance(value, list | tuple) else tuple(sorted(value))


def strings(
    name: str, value: object, limit: int = MAX_STRINGS, most_chars: int = MAX_STRINGS * MAX_STRING_CHARS
) -> tuple[str, ...]:
    """Return at most `limit` strings, of at most `most_chars` characters together; a string counts as a list of one."""
    allowed = f"a string or up to {limit} non-empty strings of at most {MAX_STRING_CHARS} characters"
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or len(items) > limit:
        raise InvalidParameter(name, value, allowed)
    for string in items:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STRING_CHARS:
            raise InvalidParameter(name, string, allowed)
    num_chars = sum(map(len, items))
    if num_chars > most_chars:
        raise InvalidParameter(name, f"{num_chars} characters", f"{allowed}, {most_chars} in all")
    return tuple(items)


def logit_bias(value: object) -> Mapping[int, float] | None:
    """Return a logit bias; None for an empty one."""
    allowed = f"a map of at most {MAX_LOGIT_BIAS} token ids to numbers from -100 to 100"
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:
        raise InvalidParameter("logit_bias", value, allowed)
    bias: dict[int, float] = {}
    for token_id, amount in value.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise InvalidParameter("logit_bias", token_id, allowed)
        bias[token_id] = number("logit_bias", amount, -100.0, 100.0)
    return bias or None


def processors(value: object) -> tuple[Callable[..., Any], ...]:
    """Return logits processors; None is an empty list."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(callable(processor) for processor in value):
        raise InvalidParameter("logits_processors", value, "a list of functions")
    return tuple(value)


def strategy(value: Any) -> Strategy[Any] | None:
    """Return a strategy, an object with the methods of `Strategy`, or None."""
    if value is not None and not all(callable(getattr(value, name, None)) for name in ("num_draws", "advance")):
        raise InvalidParameter("strategy", value, "an object with the methods num_draws and advance, or None")
    return value  # type: ignore[no-any-return]


def speculative(value: object, strategy: Strategy[Any] | None) -> bool | None:
    """Return whether the request wants drafts, None for the engine's default; a custom strategy gets no drafts."""
    if value is not None and not isinstance(value, bool):
        raise InvalidParameter("speculative", value, "true, false or None")
    if value and strategy is not None:
        raise InvalidParameter("speculative", True, "false or None with a strategy, which gets no drafts")
    return value
