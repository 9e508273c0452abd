"""The slow twin of the incremental parsers: reads a whole text at once, with Python's JSON and regular expressions."""

from __future__ import annotations

import json
import re
from typing import Any

from quire.text.tool_calls.calls import CallDelta, Piece, merge

SPACE = " \t\n\r"
NAMED = re.compile(r"\s*([\w-]+)(?:\s*\[CALL_ID\]\s*[\w-]*)?(?:\s*\[ARGS\])?\s*(?=\{)", re.ASCII)
Calls = list[tuple[str, str]]


def read_whole(form: str, text: str, names: frozenset[str]) -> list[Piece]:
    """Return what a text holds that no grammar was kept to."""
    marker, read = {
        "hermes": ("<tool_call>", _hermes),
        "llama3": ("<|python_tag|>", _llama3),
        "mistral": ("[TOOL_CALLS]", _mistral),
    }[form]
    pieces: list[Piece] = []
    num_calls = 0

    def add(calls: Calls) -> None:
        nonlocal num_calls
        for name, arguments in calls:
            pieces.append(CallDelta(num_calls, name, arguments, is_last=True))
            num_calls += 1

    bare = _llama3(text, names) if form == "llama3" else None
    if bare is not None:
        add(bare[0])
        return merge(pieces)
    content, pos = "", 0
    while pos < len(text):
        found = read(text[pos + len(marker) :], names) if text.startswith(marker, pos) else None
        if found is None:
            content += text[pos]
            pos += 1
            continue
        pieces.append(content.rstrip(SPACE))
        add(found[0])
        content, pos = "", pos + len(marker) + found[1]
    if not num_calls or content.strip(SPACE):
        pieces.append(content)
    return merge(pieces)


def _object(text: str, names: frozenset[str]) -> tuple[tuple[str, str], int] | None:
    """Return the call that a text begins with, and its length."""
    found = _json(text)
    if found is None:
        return None
    value, end = found
    keys = [key for key in ("arguments", "parameters") if key in value]
    if len(keys) != 1 or not isinstance(value[keys[0]], dict):
        return None
    if not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    # The arguments as they are written: of all that parses to them, what stands behind the key.
    written = text[:end]
    for match in reversed(list(re.finditer(r"\{", written))):
        found = _json(written[match.start() :])
        before = written[: match.start()].rstrip(SPACE).removesuffix(":").rstrip(SPACE)
        if found and found[0] == value[keys[0]] and before.endswith(f'"{keys[0]}"') and _depth(before) == 1:
            return (value["name"], written[match.start() : match.start() + found[1]]), end
    raise AssertionError(f"no arguments in {written!r}")


def _json(text: str) -> tuple[dict[str, Any], int] | None:
    begin = len(text) - len(text.lstrip(SPACE))
    if not text.startswith("{", begin):
        return None
    decoder = json.JSONDecoder(parse_constant=_refuse)
    try:
        value, end = decoder.raw_decode(text, begin)
    except ValueError:
        return None
    return value, end


def _refuse(name: str) -> object:
    raise ValueError(name)


def _depth(text: str) -> int:
    bare = re.sub(r'"(\\.|[^"\\])*"', "", text, flags=re.DOTALL)
    return bare.count("{") + bare.count("[") - bare.count("}") - bare.count("]")


def _hermes(text: str, names: frozenset[str]) -> tuple[Calls, int] | None:
    found = _object(text, names)
    if found is None:
        return None
    rest = text[found[1] :]
    stripped = rest.lstrip(SPACE)
    if stripped.startswith("</tool_call>"):
        return [found[0]], found[1] + len(rest) - len(stripped) + len("</tool_call>")
    return ([found[0]], len(text)) if "</tool_call>".startswith(stripped) else None


def _llama3(text: str, names: frozenset[str]) -> tuple[Calls, int] | None:
    calls, pos = [], 0
    while (found := _object(text[pos:], names)) is not None:
        calls.append(found[0])
        rest = text[pos + found[1] :].strip(SPACE)
        if rest in ("", ";"):
            return calls, len(text)
        if not rest.startswith(";"):
            return None
        pos = text.index(";", pos + found[1]) + 1
    return None


def _mistral(text: str, names: frozenset[str]) -> tuple[Calls, int] | None:
    if not text.lstrip(SPACE).startswith("["):
        match = NAMED.match(text)
        parsed = _json(text[match.end() :]) if match and match[1] in names else None
        if match is None or parsed is None:
            return None
        return [(match[1], text[match.end() : match.end() + parsed[1]])], match.end() + parsed[1]
    calls, pos = [], text.index("[") + 1
    while (found := _object(text[pos:], names)) is not None:
        calls.append(found[0])
        pos += found[1]
        rest = text[pos:].lstrip(SPACE)
        if rest.startswith("]"):
            return calls, len(text) - len(rest) + 1
        if rest.strip(SPACE) in ("", ","):
            return calls, len(text)
        if not rest.startswith(","):
            return None
        pos = len(text) - len(rest) + 1
    return None
