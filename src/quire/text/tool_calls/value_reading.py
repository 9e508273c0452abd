"""Reading of values in formats other than JSON, and the pieces of calls with such arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from quire.text.tool_calls.calls import CallDelta, Piece
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.parser import CallReader
from quire.text.tool_calls.typed_values import WORDS

# Returns the JSON of a value and the position after it; None if the text is not a value.
ValueReading = Generator[Piece | None, None, tuple[str, int] | None]

MAX_DEPTH = 32
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ATOM = re.compile(r"[0-9a-zA-Z.+-]*")
MAX_ATOM_CHARS = 1024
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"} | {char: char for char in "\"'/\\"}


class CallWriter:
    """Turns the arguments of one call into pieces if `CallReader.is_forced`; else collects them for `whole`."""

    def __init__(self, reader: CallReader, name: str) -> None:
        self._reader = reader
        self._name = name
        self._index = reader.num_calls
        self._members: list[str] = []

    def begin(self) -> Iterator[Piece]:
        """Yield the call's first piece, if pieces are streamed."""
        if self._reader.is_forced:
            self._reader.num_calls += 1
            self._reader.note_name(None)
            yield CallDelta(self._index, self._name, "{")

    def member(self, key: str, value: str) -> Iterator[Piece]:
        """Add one argument, and yield it if pieces are streamed."""
        text = f"{', ' if self._members else ''}{json.dumps(key, ensure_ascii=False)}: {value}"
        self._members.append(text)
        if self._reader.is_forced:
            yield CallDelta(self._index, arguments=text)

    def end(self) -> Iterator[Piece]:
        """Yield the call's last piece, if pieces are streamed."""
        if self._reader.is_forced:
            yield CallDelta(self._index, arguments="}", is_last=True)

    @property
    def whole(self) -> tuple[str, str] | None:
        """The name and the arguments of a complete call, if pieces are not streamed."""
        return None if self._reader.is_forced else (self._name, f"{{{''.join(self._members)}}}")

    def broken(self, incoming: Incoming, pos: int) -> int | None:
        """Return the end of a malformed or truncated call, if pieces are streamed; else None, so that it is content."""
        if not self._reader.is_forced:
            return None
        return len(incoming.text) if incoming.is_ended else pos


@dataclass(frozen=True, slots=True)
class ValueReader:
    """Reads values.

    Args:
        quote: marker before and after a string without escapes; "" for strings as in Python.
        bare_key: regular expression of a key without quotes; "" if all keys have quotes.
    """

    quote: str = ""
    bare_key: str = ""

    def value(self, incoming: Incoming, pos: int, depth: int = 0) -> ValueReading:
        """Read a value after white space."""
        if depth > MAX_DEPTH:
            return None
        begin = yield from incoming.past_space(pos)
        assert begin is not None
        char = incoming.text[begin : begin + 1]
        if char == "[":
            return (yield from self._array(incoming, begin + 1, depth))
        if char == "{":
            return (yield from self._object(incoming, begin + 1, depth))
        if char in ('"', "'", "<"):
            return (yield from self.string(incoming, begin))
        return (yield from _atom(incoming, begin))

    def string(self, incoming: Incoming, pos: int) -> ValueReading:
        """Read the string that begins at a position."""
        if self.quote and incoming.text[pos : pos + 1] == "<":
            begin = yield from incoming.literal(pos, self.quote)
            end = None if begin is None else (yield from incoming.past(begin, self.quote))
            if begin is None or end is None:
                return None
            return json.dumps(incoming.text[begin : end - len(self.quote)], ensure_ascii=False), end
        return (yield from _quoted(incoming, pos))

    def key(self, incoming: Incoming, pos: int) -> ValueReading:
        """Read a key after white space, without the colon; return the plain text of the key in place of JSON."""
        begin = yield from incoming.past_space(pos)
        assert begin is not None
        if incoming.text[begin : begin + 1] in ('"', "'", "<"):
            key = yield from self.string(incoming, begin)
            return None if key is None else (json.loads(key[0]), key[1])
        if not self.bare_key:
            return None
        end = yield from incoming.matching(begin, re.compile(self.bare_key), MAX_ATOM_CHARS)
        return None if end is None or end == begin else (incoming.text[begin:end], end)

    def _array(self, incoming: Incoming, pos: int, depth: int) -> ValueReading:
        items: list[str] = []
        while True:
            closed = yield from incoming.literal(pos, "]")
            if closed is not None:
                return f"[{', '.join(items)}]", closed
            if items:
                comma = yield from incoming.literal(pos, ",")
                if comma is None:
                    return None
                pos = comma
            item = yield from self.value(incoming, pos, depth + 1)
            if item is None:
                return None
            items.append(item[0])
            pos = item[1]

    def _object(self, incoming: Incoming, pos: int, depth: int) -> ValueReading:
        members: list[str] = []
        while True:
            closed = yield from incoming.literal(pos, "}")
            if closed is not None:
                return f"{{{', '.join(members)}}}", closed
            if members:
                comma = yield from incoming.literal(pos, ",")
                if comma is None:
                    return None
                pos = comma
            member = yield from self.member(incoming, pos, ":", depth + 1)
            if member is None:
                return None
            key, value, pos = member
            members.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")

    def member(
        self, incoming: Incoming, pos: int, colon: str, depth: int = 0
    ) -> Generator[Piece | None, None, tuple[str, str, int] | None]:
        """Read a key and a value; return the key, the value as JSON, and the end."""
        key = yield from self.key(incoming, pos)
        after = None if key is None else (yield from incoming.literal(key[1], colon))
        value = None if after is None else (yield from self.value(incoming, after, depth))
        return None if key is None or value is None else (key[0], *value)

    def call(self, incoming: Incoming, pos: int, writer: CallWriter, colon: str, close: str) -> Reading:
        """Read a call's arguments after their opening bracket."""
        is_first = True
        while True:
            closed = yield from incoming.literal(pos, close)
            if closed is not None:
                return closed
            comma = pos if is_first else (yield from incoming.literal(pos, ","))
            member = None if comma is None else (yield from self.member(incoming, comma, colon))
            if member is None:
                return None
            key, value, pos = member
            yield from writer.member(key, value)
            is_first = False


def literal_json(text: str) -> str | None:
    """Return the JSON of a list or an object in Python's syntax, which some templates write; None for other texts."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    incoming = Incoming(text.strip())
    incoming.is_ended = True
    try:
        next(ValueReader().value(incoming, 0))
    except StopIteration as end:
        found: tuple[str, int] | None = end.value
        return found[0] if found is not None and found[1] == len(incoming.text) else None
    raise AssertionError("a reading of a whole text waits for more")


def _quoted(incoming: Incoming, pos: int) -> ValueReading:
    """Read a string in single or double quotes."""
    quote = incoming.text[pos]
    end = pos + 1
    while True:
        while end < len(incoming.text) and incoming.text[end] != quote:
            end += 2 if incoming.text[end] == "\\" else 1
        if end < len(incoming.text):
            return json.dumps(_unescaped(incoming.text[pos + 1 : end]), ensure_ascii=False), end + 1
        if incoming.is_ended:
            return None
        yield None


def _unescaped(text: str) -> str:
    """Return the value of a string from its text between quotes; unknown escapes stay, as in Python."""
    if "\\" not in text:
        return text
    value = ESCAPE.sub(lambda match: _character(match[0]), text)
    # Characters beyond 16 bits are written as two escapes in JSON.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(escape: str) -> str:
    return chr(int(escape[2:], 16)) if len(escape) > 2 else ESCAPES.get(escape[1], escape)


def _atom(incoming: Incoming, pos: int) -> ValueReading:
    """Read a number or a word."""
    end = yield from incoming.matching(pos, ATOM, MAX_ATOM_CHARS)
    text = "" if end is None else incoming.text[pos:end]
    text = WORDS.get(text, text)
    if end is None or not (NUMBER.fullmatch(text) or text in WORDS.values()):
        return None
    return text, end
