"""The parsed pieces of an output: content, and parts of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

NAME = "[a-zA-Z0-9_-]{1,64}"
NAME_PATTERN = re.compile(NAME)
# Each format has one of the two keys, but a call with the other one is accepted too.
ARGUMENT_KEYS = ("arguments", "parameters")
JSON_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called.

    Args:
        name: name, which matches `NAME`.
        parameters: JSON schema of the arguments, which are an object.
        is_strict: True to refuse a schema with parts that cannot be enforced; False to enforce it without these parts.
        field: name of the schema's field in error messages.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    field: str = "tools"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call.

    Args:
        index: index of the call in the output, from 0.
        name: name of the function in the call's first piece; else None.
        arguments: next part of the arguments, as JSON.
        is_last: True if the call is complete.
    """

    index: int
    name: str | None = None
    arguments: str = ""
    is_last: bool = False


# A string is a piece of content.
Piece = str | CallDelta


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Join consecutive pieces of content, or of one call."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, str):
            if isinstance(last, str):
                merged[-1] = last + piece
            elif piece:
                merged.append(piece)
        elif isinstance(last, CallDelta) and last.index == piece.index:
            merged[-1] = CallDelta(piece.index, last.name, last.arguments + piece.arguments, piece.is_last)
        else:
            merged.append(piece)
    return merged


def read_call(text: str, names: Container[str], name_key: str = "name") -> tuple[str, str] | None:
    """Return the name and the unchanged arguments of a call that is one JSON object."""
    call = read_object(text)
    name = None if call is None else call.get(name_key)
    if call is None or not isinstance(name, str) or name not in names:
        return None
    keys = [key for key in ARGUMENT_KEYS if key in call]
    if len(keys) != 1 or not isinstance(call[keys[0]], dict):
        return None
    return name, _member(text, keys[0])


def read_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; return None if the text is anything else."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _member(text: str, wanted: str) -> str:
    """Return the unchanged text of a member's value in a valid JSON object; the last one of a repeated key."""
    decode = json.JSONDecoder().raw_decode
    value = ""
    pos = _past_space(text, text.index("{") + 1)
    while text[pos] != "}":
        key, pos = decode(text, pos)
        begin = _past_space(text, _past_space(text, pos) + 1)
        _, end = decode(text, begin)
        if key == wanted:
            value = text[begin:end]
        pos = _past_space(text, end)
        if text[pos] == ",":
            pos = _past_space(text, pos + 1)
    return value


def _past_space(text: str, pos: int) -> int:
    while text[pos] in JSON_SPACE:
        pos += 1
    return pos


def refuse_constant(name: str) -> NoReturn:
    """Refuse `NaN` and `Infinity`, which Python reads as JSON; an argument of `json.loads`."""
    raise ValueError(f"{name} is not a JSON number")
