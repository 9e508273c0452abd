"""Parsing of calls that are JSON objects with a name and arguments, and of arguments that are JSON."""

from __future__ import annotations

from collections.abc import Container, Generator

from quire.text.tool_calls.calls import ARGUMENT_KEYS, CallDelta, Piece, read_call, read_object
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.markup import CallObject
from quire.text.tool_calls.parser import CallReader

Call = tuple[str, str]


def whole_call(
    incoming: Incoming, pos: int, names: Container[str], name_key: str
) -> Generator[Piece | None, None, tuple[Call, int] | None]:
    """Read a whole object; return its call, and its end."""
    begin = yield from incoming.past_space(pos)
    assert begin is not None
    end = yield from incoming.json_object(begin)
    if end is None:
        return None
    call = read_call(incoming.text[begin:end], names, name_key)
    return None if call is None else (call, end)


def stream_call(incoming: Incoming, pos: int, reader: CallReader, form: CallObject) -> Reading:
    """Read an object that a grammar constrains; yield the call while it arrives, from the start of its arguments."""
    begin = yield from incoming.literal(pos, "{")
    if begin is None:
        return None
    head = yield from _head(incoming, begin, reader, form)
    if head is None:
        return None
    name, begin = head
    end = yield from stream_arguments(incoming, begin, reader, name)
    assert end is not None
    comma = (yield from incoming.literal(end, ",")) if form.last_key else None
    last = None if comma is None else (yield from _member(incoming, comma))
    end = end if last is None else last[2]
    closed = yield from incoming.literal(end, "}", may_be_cut=True)
    return end if closed is None else closed


def stream_arguments(incoming: Incoming, begin: int, reader: CallReader, name: str) -> Reading:
    """Yield a call while its arguments, an object, arrive; return their end, or the end of a truncated text."""
    index = reader.num_calls
    reader.num_calls += 1
    reader.note_name(None)
    yield CallDelta(index, name)
    end = yield from incoming.json_object(begin, index)
    if end is None:
        return len(incoming.text)
    yield CallDelta(index, is_last=True)
    return end


def read_arguments(incoming: Incoming, begin: int, reader: CallReader, name: str) -> Reading:
    """Read a call's arguments, the object at `begin`, and yield the call."""
    if reader.is_forced:
        return (yield from stream_arguments(incoming, begin, reader, name))
    end = yield from incoming.json_object(begin)
    if end is None or read_object(incoming.text[begin:end]) is None:
        return None
    yield reader.whole_call(name, incoming.text[begin:end])
    return end


def _head(
    incoming: Incoming, pos: int, reader: CallReader, form: CallObject
) -> Generator[Piece | None, None, tuple[str, int] | None]:
    """Read `"name": "...", "arguments":`, optionally after an id or a type; return the name and the end."""
    member = yield from _member(incoming, pos)
    if member is not None and (member[:2] == ("type", "function") or member[0] == form.first_key):
        comma = yield from incoming.literal(member[2], ",")
        member = None if comma is None else (yield from _member(incoming, comma))
    if member is None or member[0] != form.name_key or member[1] not in reader.functions:
        return None
    _, name, pos = member
    reader.note_name(name)
    comma = yield from incoming.literal(pos, ",")
    key = None if comma is None else (yield from _string(incoming, comma))
    if key is None or key[0] not in ARGUMENT_KEYS:
        return None
    colon = yield from incoming.literal(key[1], ":")
    begin = None if colon is None else (yield from incoming.literal(colon, "{"))
    return None if begin is None else (name, begin - 1)


def _member(incoming: Incoming, pos: int) -> Generator[Piece | None, None, tuple[str, str, int] | None]:
    """Read a key and a value that are plain names; return them and their end."""
    key = yield from _string(incoming, pos)
    colon = None if key is None else (yield from incoming.literal(key[1], ":"))
    value = None if colon is None else (yield from _string(incoming, colon))
    return None if key is None or value is None else (key[0], *value)


def _string(incoming: Incoming, pos: int) -> Generator[Piece | None, None, tuple[str, int] | None]:
    """Read a string that is a plain name; return it and its end."""
    begin = yield from incoming.literal(pos, '"')
    end = None if begin is None else (yield from incoming.name(begin))
    if begin is None or end is None or incoming.text[end : end + 1] != '"':
        return None
    return incoming.text[begin:end], end + 1
