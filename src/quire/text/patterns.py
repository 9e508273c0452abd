"""Regular expressions of tokenizers, read as far as to say where a text can be cut without changing what they find.

A tokenizer's expression is searched for from left to right. Between a character `a` and the one behind it, `b`, a text
can be cut if no match holds `a` and `b` side by side, and no look-ahead behind `a` tells `b` from the end of a text:
then no way that the search could try goes on across the cut, and each side is searched as if the other were not there.

What may match is judged generously and what must match strictly. Expressions with anything that is not read here
(anchors, look-behind, references, sets within sets) are refused.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
CATEGORY = re.compile("[LMNPSZC][a-z]?")

Test = Callable[[str], bool]


class Unread(ValueError):
    """An expression with something that is not read here."""


class Around(NamedTuple):
    """What a part of an expression can do with two neighbours `a` and `b`.

    Args:
        spans: a match may hold `a` and behind it `b`, or depend on whether `b` or the end of the text is behind `a`.
        opens: it may begin with `b`, or look whether `b` comes first.
        holds: it may match `a` or `b` anywhere.
        begins, ends: it may begin, or end, with `a`.
        may_skip: it may match nothing.
        must_skip: it can match nothing whatever is there.
        alone: it can match `a` alone whatever is behind it.
    """

    spans: bool = False
    opens: bool = False
    holds: bool = False
    begins: bool = False
    ends: bool = False
    may_skip: bool = False
    must_skip: bool = False
    alone: bool = False

    def then(self, other: Around) -> Around:
        """Return the same of this part and another one behind it."""
        return Around(
            spans=self.spans or other.spans or (self.ends and other.opens),
            opens=self.opens or (self.may_skip and other.opens),
            holds=self.holds or other.holds,
            begins=self.begins or (self.may_skip and other.begins),
            ends=other.ends or (other.may_skip and self.ends),
            may_skip=self.may_skip and other.may_skip,
            must_skip=self.must_skip and other.must_skip,
            alone=(self.alone and other.must_skip) or (self.must_skip and other.alone),
        )


NOTHING = Around(may_skip=True, must_skip=True)


class Chars(NamedTuple):
    """One character of a set; `may` says too much rather than too little, `must` the other way round."""

    may: Test
    must: Test

    def around(self, a: str, b: str) -> Around:
        is_a, is_b = self.may(a), self.may(b)
        return Around(opens=is_b, holds=is_a or is_b, begins=is_a, ends=is_a, alone=self.must(a))


class LookAhead(NamedTuple):
    """Whether the next character is of a set, or is not."""

    chars: Chars

    def around(self, a: str, b: str) -> Around:  # noqa: ARG002 - what comes before is not looked at
        return Around(opens=self.chars.may(b), may_skip=True)


class Row(NamedTuple):
    """Parts one behind the other."""

    parts: tuple[Node, ...]

    def around(self, a: str, b: str) -> Around:
        whole = NOTHING
        for part in self.parts:
            whole = whole.then(part.around(a, b))
        return whole


class Choice(NamedTuple):
    """One of several parts."""

    parts: tuple[Node, ...]

    def around(self, a: str, b: str) -> Around:
        each = [part.around(a, b) for part in self.parts]
        return Around(*(any(values) for values in zip(*each, strict=True)))


class Repeat(NamedTuple):
    """A part so many times; `keeps` one that gives nothing back for what is behind it."""

    part: Node
    low: int
    high: float
    keeps: bool

    def around(self, a: str, b: str) -> Around:
        once = self.part.around(a, b)
        many = once.then(once) if self.high > 1 else once
        may_skip = not self.low or once.may_skip
        must_skip = not self.low or once.must_skip
        return Around(
            spans=many.spans,
            opens=many.opens,
            holds=many.holds,
            begins=many.begins,
            ends=many.ends,
            may_skip=may_skip,
            must_skip=must_skip and not (self.keeps and once.begins),
            alone=self.high > 0 and (once.alone if self.low <= 1 else once.alone and once.must_skip),
        )


Node = Chars | LookAhead | Row | Choice | Repeat


class Pattern:
    """A regular expression as tokenizers have them (Oniguruma's syntax).

    Args:
        source: the expression.

    Raises:
        Unread: it has something that is not read here.
    """

    def __init__(self, source: str) -> None:
        self._node = _Reader(source).read()

    @classmethod
    def of_text(cls, text: str) -> Pattern:
        """Return the expression that finds just a text."""
        pattern = cls("")
        pattern._node = Row(tuple(_char(char) for char in text))
        return pattern

    def can_cut(self, a: str, b: str) -> bool:
        """Say whether a text can be cut between two characters: each side is then searched as before."""
        around = self._node.around(a, b)
        return not around.spans and not around.may_skip

    def can_hold(self, a: str, b: str) -> bool:
        """Say whether a match may hold one of two characters."""
        return self._node.around(a, b).holds

    def always_ends(self, a: str, b: str) -> bool:
        """Say whether, wherever `b` is behind `a`, there is a match that ends with `a`."""
        return self.can_cut(a, b) and self._node.around(a, b).alone


# ---- reading ----


def _char(char: str) -> Chars:
    return Chars(lambda c: c == char, lambda c: c == char)


# All characters but line ends, or all.
ANY = Chars(lambda _: True, str.isalnum)


def _any_case(chars: Chars) -> Chars:
    """Return a set for which letters of either case are alike: it may have all of them."""
    return Chars(lambda c: _has_case(c) or chars.may(c), lambda c: not _has_case(c) and chars.must(c))


def _has_case(char: str) -> bool:
    return char.lower() != char or char.upper() != char


def _category(name: str, *, is_negated: bool) -> Test:
    if name.startswith("^"):
        name, is_negated = name[1:], not is_negated
    if not CATEGORY.fullmatch(name):
        raise Unread(f"the property {name!r}")
    return lambda c: (unicodedata.category(c).startswith(name)) != is_negated


def _is_word(char: str) -> bool:
    return unicodedata.category(char)[0] in "LM" or unicodedata.category(char) in ("Nd", "Pc")


# What `\s`, `\d` and `\w` stand for; capitals for the opposite.
SETS: dict[str, Test] = {
    "s": lambda c: c in " \t\n\r\f\v\x85" or unicodedata.category(c)[0] == "Z",
    "d": lambda c: unicodedata.category(c) == "Nd",
    "w": _is_word,
}


class _Reader:
    """Reads one expression by recursive descent."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._place = 0
        self._ignores_case = False

    def read(self) -> Node:
        node = self._choice()
        if self._place < len(self._source):
            raise Unread("a closing parenthesis too many")
        return node

    def _peek(self) -> str:
        return self._source[self._place : self._place + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise Unread("it ends too soon")
        self._place += 1
        return char

    def _take(self, text: str) -> bool:
        is_there = self._source.startswith(text, self._place)
        self._place += len(text) if is_there else 0
        return is_there

    def _choice(self) -> Node:
        rows = [self._row()]
        while self._take("|"):
            rows.append(self._row())
        return rows[0] if len(rows) == 1 else Choice(tuple(rows))

    def _row(self) -> Node:
        parts: list[Node] = []
        while self._peek() and self._peek() not in "|)":
            parts.append(self._repeated(self._atom()))
        return Row(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        while True:
            is_count = self._peek() == "{"
            if self._peek() and self._peek() in "?*+":
                low, high = {"?": (0, 1.0), "*": (0, float("inf")), "+": (1, float("inf"))}[self._next()]
            elif self._peek() == "{":
                low, high = self._counts()
            else:
                return node
            if is_count and low == high and self._peek() and self._peek() in "?*+":
                raise Unread("a mark behind a single number, which engines read differently")
            # A mark behind it: "?" takes as little as possible, which are the same matches at most. "+" gives nothing
            # back, but behind a count in braces it repeats all of it.
            is_lazy = self._take("?")
            node = Repeat(node, low, high, keeps=not is_count and not is_lazy and self._take("+"))

    def _counts(self) -> tuple[int, float]:
        end = self._source.find("}", self._place)
        low, comma, high = self._source[self._place + 1 : end].partition(",")
        if end < 0 or not low.isdecimal() or not (high.isdecimal() or not high):
            raise Unread("a brace that counts nothing")
        self._place = end + 1
        return int(low), float("inf") if comma and not high else float(high or low)

    def _atom(self) -> Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._cased(self._set())
        if char == ".":
            return ANY
        if char == "\\":
            test = self._escape()
            return self._cased(Chars(test, test))
        if char == "$":
            return LookAhead(ANY)
        if char in "^?*+{":
            raise Unread(f"{char!r} at its place")
        return self._cased(_char(char))

    def _cased(self, chars: Chars) -> Chars:
        return _any_case(chars) if self._ignores_case else chars

    def _group(self) -> Node:
        before = self._ignores_case
        is_look = False
        if self._take("?:"):
            pass
        elif self._take("?i:"):
            self._ignores_case = True
        elif self._take("?!") or self._take("?="):
            is_look = True
        elif self._peek() == "?":
            raise Unread("a group of another kind")
        node = self._choice()
        self._ignores_case = before
        if not self._take(")"):
            raise Unread("a group that does not end")
        if not is_look:
            return node
        while isinstance(node, Row) and len(node.parts) == 1:
            node = node.parts[0]
        if not isinstance(node, Chars):
            raise Unread("a look-ahead of more than one character")
        return LookAhead(node)

    def _escape(self) -> Test:
        """Return what is behind a backslash."""
        char = self._next()
        if char in "pP":
            name = self._next()
            if name == "{":
                end = self._source.find("}", self._place)
                name, self._place = self._source[self._place : end], end + 1
                if end < 0:
                    raise Unread("a property that does not end")
            return _category(name, is_negated=char == "P")
        if char.lower() in SETS:
            inner, is_negated = SETS[char.lower()], char.isupper()
            return lambda c: inner(c) != is_negated
        return _char(self._escaped_char(char)).may

    def _escaped_char(self, char: str) -> str:
        if char in CONTROLS:
            return CONTROLS[char]
        if char in "xu":
            digits = self._source[self._place : self._place + (2 if char == "x" else 4)]
            if len(digits) < 2 or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise Unread("a character by another kind of number")
            self._place += len(digits)
            return chr(int(digits, 16))
        if char.isalnum():
            raise Unread(f"the escape {char!r}")
        return char

    def _set(self) -> Chars:
        is_negated = self._take("^")
        tests = [self._member()]
        while not self._take("]"):
            tests.append(self._member())
        test: Test = lambda c: any(each(c) for each in tests) != is_negated  # noqa: E731 - as those that it is made of
        return Chars(test, test)

    def _member(self) -> Test:
        """Return a member of a set: a character, a range, or a set by its escape."""
        char = self._next()
        if char in "[]" or (char == "&" and self._peek() == "&"):
            raise Unread("a set within a set, or an empty one")
        if char == "\\":
            if self._peek() and self._peek() in "pPsSdDwW":
                return self._escape()
            char = self._escaped_char(self._next())
        if self._peek() != "-" or self._source[self._place + 1 : self._place + 2] in ("]", ""):
            return _char(char).may
        self._next()
        last = self._next()
        if last == "\\":
            last = self._escaped_char(self._next())
        if last == "[" or last < char:
            raise Unread("a range that is none")
        return lambda c: char <= c <= last
