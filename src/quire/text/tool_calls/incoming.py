"""Parsing of text while it arrives: a reading is a generator that yields None when it needs more text."""

from __future__ import annotations

import re
from collections.abc import Generator

from quire.text.tool_calls.calls import JSON_SPACE, CallDelta, Piece

# Yields pieces, and None when it needs more text; returns the position after the text that it read.
Reading = Generator[Piece | None, None, int | None]

PLAIN_NAME = re.compile("[a-zA-Z0-9_-]*")
MAX_NAME_CHARS = 64
# Outside strings: brackets, quotes, and characters that JSON does not allow. A marker contains one of them, so every
# reading that begins inside an object ends early, and all of them together take linear time.
STRUCTURE = re.compile(r"[^ \t\n\r,:0-9eE+.\-truefalsn]")
IN_STRING = re.compile(r'["\\]')


class Incoming:
    """The received text that was not consumed yet.

    Positions count from its beginning; `consume` moves them. Every reading returns the position after the text that it
    read, or None if the text does not match, or ended before.
    """

    __slots__ = ("is_ended", "text")

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.is_ended = False

    def consume(self, num_chars: int) -> str:
        """Remove the first characters and return them."""
        head, self.text = self.text[:num_chars], self.text[num_chars:]
        return head

    def past_space(self, pos: int) -> Reading:
        """Read white space up to another character or the end of the text."""
        while True:
            while pos < len(self.text):
                if self.text[pos] not in JSON_SPACE:
                    return pos
                pos += 1
            if self.is_ended:
                return pos
            yield None

    def literal(self, pos: int, wanted: str, *, may_be_cut: bool = False) -> Reading:
        """Read white space and then a literal."""
        begin = yield from self.past_space(pos)
        assert begin is not None
        while True:
            chars = self.text[begin : begin + len(wanted)]
            if chars == wanted:
                return begin + len(wanted)
            if not wanted.startswith(chars):
                return None
            if self.is_ended:
                return len(self.text) if may_be_cut else None
            yield None

    def name(self, pos: int) -> Reading:
        """Read the letters of a function's name, possibly none."""
        return self.matching(pos, PLAIN_NAME, MAX_NAME_CHARS)

    def matching(self, pos: int, pattern: re.Pattern[str], most: int) -> Reading:
        """Read the longest text that matches a pattern, possibly none."""
        while True:
            match = pattern.match(self.text, pos)
            end = pos if match is None else match.end()
            if end - pos > most:
                return None
            if end < len(self.text) or self.is_ended:
                return end
            yield None

    def past(self, pos: int, wanted: str, unless: str = "") -> Reading:
        """Read text up to a literal, and the literal."""
        begin = pos
        either = re.compile("|".join(re.escape(text) for text in (wanted, unless) if text))
        while True:
            match = either.search(self.text, begin)
            if match is not None:
                return match.end() if match[0] == wanted else None
            if self.is_ended:
                return None
            begin = max(pos, len(self.text) - max(len(wanted), len(unless)) + 1)
            yield None

    def json_object(self, pos: int, index: int | None = None) -> Reading:
        """Read a JSON object by its brackets and strings, without full validation; with `index`, yield it in pieces."""
        if (yield from self.literal(pos, "{")) != pos + 1:
            return None
        scan = BracketScan(is_strict=index is None)
        while True:
            end = scan.advance(self.text, pos)
            if scan.is_broken:
                return None
            upto = len(self.text) if end is None else end
            if index is not None and upto > pos:
                yield CallDelta(index, arguments=self.text[pos:upto])
            if end is not None:
                return end
            if self.is_ended:
                return None
            pos = upto
            yield None


class BracketScan:
    """Finds the end of a JSON object or array, in one pass over text that arrives in parts."""

    __slots__ = ("_depth", "_in_string", "_is_escaped", "_is_strict", "is_broken")

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self.is_broken = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def advance(self, text: str, pos: int) -> int | None:
        """Scan the text from a position on; return the end of the value, or None if it is incomplete or broken."""
        while pos < len(text):
            if self._is_escaped:
                self._is_escaped = False
                pos += 1
                continue
            match = (IN_STRING if self._in_string else STRUCTURE).search(text, pos)
            if match is None:
                return None
            pos = match.end()
            char = match[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._is_escaped = True
            elif char in "{[":
                self._depth += 1
            elif char not in "]}":
                if self._is_strict:
                    self.is_broken = True
                    return None
            else:
                self._depth -= 1
                if self._depth == 0:
                    return pos
        return None
