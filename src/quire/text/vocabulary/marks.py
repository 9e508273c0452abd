"""Marks in the texts of clients, which identify clients' characters in a rendered prompt.

A control token in a prompt is the template's only if the template wrote all of it. Templates trim texts, cut and join
them, and write them as JSON, so positions in a text say nothing about positions in the prompt. Instead, before
the template is rendered, each character of clients' texts with which a control token begins or ends is replaced by a
mark. Marks are lone surrogates, which a prompt cannot contain otherwise, since they are not Unicode text. A marked text
is compared, searched and cut like the unmarked text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple, SupportsIndex

# First mark of texts in which all control tokens are sanitized, and first mark of texts in which some stay.
STRICT, LENIENT = 0xD800, 0xDC00
MAX_CHARS: Final = LENIENT - STRICT
SURROGATE: Final = re.compile("[\ud800-\udfff]")
# An escaped surrogate in JSON or Python; a pair of backslashes is matched first, since it begins no escape.
ESCAPED: Final = re.compile(r"(\\\\)|\\u(d[89a-f][0-9a-f]{2})")
# Characters that are replaced in one call, which holds the interpreter's lock.
PART_CHARS: Final = 1 << 16


class MarkedTexts(NamedTuple):
    """The characters and texts that get marks.

    Args:
        edges: characters that get a mark wherever they occur.
        interiors: texts that get a mark on their first character, because a template writes the rest of a control token
            around them.
    """

    edges: str
    interiors: tuple[str, ...] = ()


class Marks:
    """Writes marks into texts, and reads them."""

    def __init__(self, wanted: MarkedTexts) -> None:
        chars = "".join(dict.fromkeys(wanted.edges + "".join(text[0] for text in wanted.interiors)))
        assert len(chars) <= MAX_CHARS
        self._marks = {first: {char: chr(first + idx) for idx, char in enumerate(chars)} for first in (STRICT, LENIENT)}
        self.plain = {ord(mark): char for marks in self._marks.values() for char, mark in marks.items()}
        self._edges = wanted.edges
        self._edge = re.compile(f"[{re.escape(wanted.edges)}]") if wanted.edges else re.compile("(?!)")
        self._interiors = frozenset(wanted.interiors)

    def remove(self, text: str) -> str:
        """Return a text with characters in place of its marks."""
        if len(text) > PART_CHARS:
            parts = range(0, len(text), PART_CHARS)
            return "".join(self.remove(str.__getitem__(text, slice(start, start + PART_CHARS))) for start in parts)
        # There are few marks, so this takes a hundredth of the time of `str.translate`.
        for mark, char in self.plain.items():
            text = str.replace(text, chr(mark), char)
        return text

    def unescape(self, text: str) -> str:
        """Return a text with marks in place of their escapes."""

        def unescaped(match: re.Match[str]) -> str:
            char = "" if match[1] else chr(int(match[2], 16))
            return char if char and ord(char) in self.plain else match[0]

        return ESCAPED.sub(unescaped, text)

    def put(self, value: Any, *, first: int = STRICT) -> Any:
        """Return a JSON value with marks in its texts; the value itself if it gets no mark."""
        if isinstance(value, str):
            return self._put(value, first)
        copy: Any = value
        # Loops, since comprehensions would nest twice as deep.
        if isinstance(value, list):
            for idx, inner in enumerate(value):
                put = self.put(inner, first=first)
                if put is not inner:
                    copy = [*value] if copy is value else copy
                    copy[idx] = put
        elif isinstance(value, dict):
            fields = {}
            for key, inner in value.items():
                name = self._put(key, first)
                fields[name] = self.put(inner, first=first)
                if name is not key or fields[name] is not inner:
                    copy = fields
        return copy

    def _put(self, text: str, first: int) -> str:
        if not text.isascii():
            text = SURROGATE.sub("\ufffd", text)
        if self._edge.search(text):
            for char in self._edges:
                text = text.replace(char, self._marks[first][char])
            return self.text_type(text)
        if self._interiors and text.strip() in self._interiors:
            begin = len(text) - len(text.lstrip())
            return self.text_type(text[:begin] + self._marks[first][text[begin]] + text[begin + 1 :])
        return text

    def with_marks(self, text: str) -> str:
        """Return a text as `text_type` if it has marks."""
        return text if text.isascii() or SURROGATE.search(text) is None else self.text_type(text)

    @cached_property
    def text_type(self) -> Callable[[str], str]:
        """The type of marked texts, a subtype of `str`."""
        return _text_type(self)


# Characters that Jinja's filter `escape` replaces: they are unmarked before, since their escapes are in no token.
HTML: Final = "&<>'\""
# Methods of strings that return a property of the text, such as a position.
ASKING: Final = (
    *("__contains__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"),
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric"),
    *("isprintable", "isspace", "istitle", "isupper"),
)
# Methods that return a text and keep all marks.
CHANGING: Final = (
    *("capitalize", "casefold", "center", "expandtabs", "join", "ljust", "lower", "rjust", "swapcase", "title"),
    *("upper", "zfill", "__mod__", "__mul__", "__rmul__", "__getitem__"),
)


def _text_type(marks: Marks) -> type[str]:
    """Return the type of texts with these marks."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return marks.remove(value) if isinstance(value, str) else value

    class Marked(str):
        """A marked text; its methods return marked texts too."""

        __slots__ = ()

        def __str__(self) -> str:
            return self

        def __repr__(self) -> str:
            return marks.unescape(super().__repr__())

        def __html__(self) -> str:
            from markupsafe import escape

            return str(escape(str.translate(self, {mark: char for mark, char in marks.plain.items() if char in HTML})))

        def __iter__(self) -> Any:
            return map(marks.with_marks, super().__iter__())

        def __add__(self, after: str) -> str:
            return Marked(super().__add__(after))

        def __radd__(self, before: str) -> str:
            return Marked(str.__add__(before, self))

        def strip(self, chars: str | None = None) -> str:
            return self.lstrip(chars).rstrip(chars)

        def lstrip(self, chars: str | None = None) -> str:
            return self[len(self) - len(plain(self).lstrip(plain(chars))) :]

        def rstrip(self, chars: str | None = None) -> str:
            return self[: len(plain(self).rstrip(plain(chars)))]

        def removeprefix(self, prefix: str) -> str:
            return self[len(prefix) :] if self.startswith(prefix) else self

        def removesuffix(self, suffix: str) -> str:
            return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

        def partition(self, sep: str) -> tuple[str, str, str]:
            return self._in_three(self.find(sep), len(sep), (self, "", ""))

        def rpartition(self, sep: str) -> tuple[str, str, str]:
            return self._in_three(self.rfind(sep), len(sep), ("", "", self))

        def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
            return self._cut(plain(self).split(plain(sep), maxsplit), sep)

        def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
            return self._cut(plain(self).rsplit(plain(sep), maxsplit), sep)

        def splitlines(self, keepends: bool = False) -> list[str]:
            ends = accumulate(map(len, plain(self).splitlines(keepends=True)), initial=0)
            lines = zip(ends, plain(self).splitlines(keepends), strict=False)
            return [self[start : start + len(line)] for start, line in lines]

        def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
            return marks.with_marks(str.join(new, self.split(old, count)) if old else super().replace(old, new, count))

        def _in_three(self, pos: int, length: int, whole: tuple[str, str, str]) -> tuple[str, str, str]:
            return whole if pos < 0 else (self[:pos], self[pos : pos + length], self[pos + length :])

        def _cut(self, pieces: list[str], sep: str | None) -> list[str]:
            """Return the marked pieces that correspond to pieces of the plain text, in order."""
            cut, text, end = list[str](), plain(self), 0
            for piece in pieces:
                start = text.index(piece, end) if sep is None else end
                cut.append(self[start : start + len(piece)])
                end = start + len(piece) + len(sep or "")
            return cut

    for name in ASKING:
        setattr(Marked, name, _asking(name, plain))
    for name in CHANGING:
        setattr(Marked, name, _changing(name, marks.with_marks))
    return Marked


def _asking(name: str, plain: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, *args: getattr(str, name)(plain(self), *map(plain, args))


def _changing(name: str, with_marks: Callable[[str], str]) -> Callable[..., Any]:
    return lambda self, *args: with_marks(getattr(str, name)(self, *args))
