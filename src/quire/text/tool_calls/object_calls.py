"""Calls that are JSON objects with a name and arguments: one alone, or a series of them."""

from __future__ import annotations

from collections.abc import Generator

from quire.text.tool_calls.calls import ARGUMENT_KEYS, CallDelta, Piece, read_call
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.parser import CallReader

Call = tuple[str, str]


def whole_call(
    incoming: Incoming, pos: int, names: frozenset[str]
) -> Generator[Piece | None, None, tuple[Call, int] | None]:
    """Wait for a whole object and return the call that it is, and where it ends."""
    begin = yield from incoming.past_space(pos)
    assert begin is not None
    end = yield from incoming.json_object(begin)
    if end is None:
        return None
    call = read_call(incoming.text[begin:end], names)
    return None if call is None else (call, end)


def told_call(incoming: Incoming, pos: int, reader: CallReader) -> Reading:
    """Read an object that keeps to a grammar: once its arguments begin it is a call, and is told as it comes."""
    begin = yield from incoming.literal(pos, "{")
    if begin is None:
        return None
    found = yield from _head(incoming, begin, reader.names)
    if found is None:
        return None
    name, begin = found
    end = yield from tell_arguments(incoming, begin, reader, name)
    assert end is not None
    closed = yield from incoming.literal(end, "}", may_be_cut=True)
    return end if closed is None else closed


def tell_arguments(incoming: Incoming, begin: int, reader: CallReader, name: str) -> Reading:
    """Tell a call whose arguments, an object, begin; they may be cut off by the end of the text, which is returned."""
    index = reader.num_calls
    reader.num_calls += 1
    yield CallDelta(index, name)
    end = yield from incoming.json_object(begin, index)
    if end is None:
        return len(incoming.text)
    yield CallDelta(index, is_last=True)
    return end


def read_series(incoming: Incoming, pos: int, reader: CallReader, separator: str, closing: str) -> Reading:
    """Read calls with separators between them.

    Args:
        incoming: the text.
        pos: where the first one begins.
        reader: what the readings share.
        separator: one character.
        closing: one character behind the last call, which may be cut off; "" where the calls end the text.
    """
    calls: list[Call] = []
    is_first = True
    while True:
        if reader.is_forced:
            end = yield from told_call(incoming, pos, reader)
            if end is None:
                return None if is_first else pos
        else:
            found = yield from whole_call(incoming, pos, reader.names)
            if found is None:
                return None
            calls.append(found[0])
            end = found[1]
        is_first = False
        after = yield from incoming.past_space(end)
        assert after is not None
        follows = incoming.text[after : after + 1]
        pos = after + len(follows)
        if follows == separator:
            after = yield from incoming.past_space(pos)
            if after != len(incoming.text):
                continue
        elif follows and follows != closing:
            return end if reader.is_forced else None
        for name, arguments in calls:
            yield reader.tell(name, arguments)
        return pos


def _head(incoming: Incoming, pos: int, names: frozenset[str]) -> Generator[Piece | None, None, tuple[str, int] | None]:
    """Read `"name": "...", "arguments":`, maybe behind `"type": "function",`; return the name, and where it ends."""
    member = yield from _member(incoming, pos)
    if member is not None and member[:2] == ("type", "function"):
        comma = yield from incoming.literal(member[2], ",")
        member = None if comma is None else (yield from _member(incoming, comma))
    if member is None or member[0] != "name" or member[1] not in names:
        return None
    _, name, pos = member
    comma = yield from incoming.literal(pos, ",")
    key = None if comma is None else (yield from _string(incoming, comma))
    if key is None or key[0] not in ARGUMENT_KEYS:
        return None
    colon = yield from incoming.literal(key[1], ":")
    begin = None if colon is None else (yield from incoming.literal(colon, "{"))
    return None if begin is None else (name, begin - 1)


def _member(incoming: Incoming, pos: int) -> Generator[Piece | None, None, tuple[str, str, int] | None]:
    """Read a key and a value that are plain names; return them, and where they end."""
    key = yield from _string(incoming, pos)
    colon = None if key is None else (yield from incoming.literal(key[1], ":"))
    value = None if colon is None else (yield from _string(incoming, colon))
    return None if key is None or value is None else (key[0], *value)


def _string(incoming: Incoming, pos: int) -> Generator[Piece | None, None, tuple[str, int] | None]:
    """Read a string that is a plain name; return it, and where it ends."""
    begin = yield from incoming.literal(pos, '"')
    end = None if begin is None else (yield from incoming.name(begin))
    if begin is None or end is None or incoming.text[end : end + 1] != '"':
        return None
    return incoming.text[begin:end], end + 1
