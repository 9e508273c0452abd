"""Analysis of tokenizers' regular expressions: the positions at which a cut of a text does not change the matches.

A tokenizer searches for its expression from left to right. A text can be cut between a character `a` and the next one,
`b`, if no match contains `a` directly before `b`, and no look-ahead after `a` distinguishes `b` from the end of a text:
then no attempt of the search crosses the cut, and each side is searched independently.

The analysis overestimates what may match, and underestimates what must match. Expressions with unsupported syntax
(anchors, look-behind, references, nested sets) are refused.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
CATEGORY = re.compile("[LMNPSZC][a-z]?")

Test = Callable[[str], bool]


class Unsupported(ValueError):
    """A tokenizer's expression or step is not supported by the analysis."""


class PairMatch(NamedTuple):
    """The matches of a part of an expression with respect to two adjacent characters `a` and `b`.

    Args:
        spans: True where a match may contain `a` directly before `b`, or distinguish `b` after `a` from the end.
        opens: True where a match may begin with `b`, or look ahead for it first.
        holds: True where a match may contain `a` or `b`.
        begins, ends: True where a match may begin, or end, with `a`.
        may_skip: True where the part may match the empty string.
        must_skip: True where the part can match the empty string in any context.
        alone: True where the part can match `a` alone with any character after it.
    """

    spans: bool = False
    opens: bool = False
    holds: bool = False
    begins: bool = False
    ends: bool = False
    may_skip: bool = False
    must_skip: bool = False
    alone: bool = False

    def then(self, other: PairMatch) -> PairMatch:
        """Return the matches of this part directly followed by another one."""
        return PairMatch(
            spans=self.spans or other.spans or (self.ends and other.opens),
            opens=self.opens or (self.may_skip and other.opens),
            holds=self.holds or other.holds,
            begins=self.begins or (self.may_skip and other.begins),
            ends=other.ends or (other.may_skip and self.ends),
            may_skip=self.may_skip and other.may_skip,
            must_skip=self.must_skip and other.must_skip,
            alone=(self.alone and other.must_skip) or (self.must_skip and other.alone),
        )


EMPTY = PairMatch(may_skip=True, must_skip=True)


class Chars(NamedTuple):
    """One character of a set; `may` holds for a superset of it, `must` for a subset."""

    may: Test
    must: Test

    def pair_match(self, a: str, b: str) -> PairMatch:
        is_a, is_b = self.may(a), self.may(b)
        return PairMatch(opens=is_b, holds=is_a or is_b, begins=is_a, ends=is_a, alone=self.must(a))


class LookAhead(NamedTuple):
    """A look-ahead for one character of a set, positive or negative."""

    chars: Chars

    def pair_match(self, a: str, b: str) -> PairMatch:  # noqa: ARG002 - the same signature for all nodes
        return PairMatch(opens=self.chars.may(b), may_skip=True)


class Concatenation(NamedTuple):
    """Parts in sequence."""

    parts: tuple[Node, ...]

    def pair_match(self, a: str, b: str) -> PairMatch:
        whole = EMPTY
        for part in self.parts:
            whole = whole.then(part.pair_match(a, b))
        return whole


class Alternation(NamedTuple):
    """One of several parts."""

    parts: tuple[Node, ...]

    def pair_match(self, a: str, b: str) -> PairMatch:
        each = [part.pair_match(a, b) for part in self.parts]
        return PairMatch(*(any(values) for values in zip(*each, strict=True)))


class Repeat(NamedTuple):
    """A repeated part; a possessive repetition never backtracks."""

    part: Node
    low: int
    high: float
    is_possessive: bool

    def pair_match(self, a: str, b: str) -> PairMatch:
        once = self.part.pair_match(a, b)
        many = once.then(once) if self.high > 1 else once
        may_skip = not self.low or once.may_skip
        must_skip = not self.low or once.must_skip
        return PairMatch(
            spans=many.spans,
            opens=many.opens,
            holds=many.holds,
            begins=many.begins,
            ends=many.ends,
            may_skip=may_skip,
            must_skip=must_skip and not (self.is_possessive and once.begins),
            alone=self.high > 0 and (once.alone if self.low <= 1 else once.alone and once.must_skip),
        )


Node = Chars | LookAhead | Concatenation | Alternation | Repeat


class Pattern:
    """A regular expression of a tokenizer (Oniguruma's syntax).

    Args:
        source: the expression.

    Raises:
        Unsupported: the expression has unsupported syntax.
    """

    def __init__(self, source: str) -> None:
        self._node = _PatternParser(source).parse()

    @classmethod
    def of_text(cls, text: str) -> Pattern:
        """Return the expression that matches a literal text."""
        pattern = cls("")
        pattern._node = Concatenation(tuple(_char(char) for char in text))
        return pattern

    def can_cut(self, a: str, b: str) -> bool:
        """Return whether a cut between two characters changes no match on either side."""
        match = self._node.pair_match(a, b)
        return not match.spans and not match.may_skip

    def can_hold(self, a: str, b: str) -> bool:
        """Return whether a match may contain one of two characters."""
        return self._node.pair_match(a, b).holds

    def always_ends(self, a: str, b: str) -> bool:
        """Return whether a match ends with `a` wherever `b` is the next character."""
        return self.can_cut(a, b) and self._node.pair_match(a, b).alone


# ---- parsing ----


def _char(char: str) -> Chars:
    return Chars(lambda c: c == char, lambda c: c == char)


# All characters, with or without line ends.
ANY = Chars(lambda _: True, str.isalnum)


def _any_case(chars: Chars) -> Chars:
    """Return a set that ignores case; it may contain every letter that has a case."""
    return Chars(lambda c: _has_case(c) or chars.may(c), lambda c: not _has_case(c) and chars.must(c))


def _has_case(char: str) -> bool:
    return char.lower() != char or char.upper() != char


def _category(name: str, *, is_negated: bool) -> Test:
    if name.startswith("^"):
        name, is_negated = name[1:], not is_negated
    if not CATEGORY.fullmatch(name):
        raise Unsupported(f"the property {name!r}")
    return lambda c: (unicodedata.category(c).startswith(name)) != is_negated


def _is_word(char: str) -> bool:
    return unicodedata.category(char)[0] in "LM" or unicodedata.category(char) in ("Nd", "Pc")


# The sets `\s`, `\d` and `\w`; capital letters negate them.
SETS: dict[str, Test] = {
    "s": lambda c: c in " \t\n\r\f\v\x85" or unicodedata.category(c)[0] == "Z",
    "d": lambda c: unicodedata.category(c) == "Nd",
    "w": _is_word,
}


class _PatternParser:
    """A recursive-descent parser of one expression."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._pos = 0
        self._ignores_case = False

    def parse(self) -> Node:
        node = self._alternation()
        if self._pos < len(self._source):
            raise Unsupported("a closing parenthesis too many")
        return node

    def _peek(self) -> str:
        return self._source[self._pos : self._pos + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise Unsupported("it ends too soon")
        self._pos += 1
        return char

    def _take(self, text: str) -> bool:
        is_there = self._source.startswith(text, self._pos)
        self._pos += len(text) if is_there else 0
        return is_there

    def _alternation(self) -> Node:
        options = [self._concatenation()]
        while self._take("|"):
            options.append(self._concatenation())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _concatenation(self) -> Node:
        parts: list[Node] = []
        while self._peek() and self._peek() not in "|)":
            parts.append(self._repeated(self._atom()))
        return Concatenation(tuple(parts))

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
                raise Unsupported("a mark after a single number, which engines read differently")
            # "?" makes a repetition lazy, which adds no match. "+" makes it possessive, but after a count in braces it
            # repeats the whole.
            is_lazy = self._take("?")
            node = Repeat(node, low, high, is_possessive=not is_count and not is_lazy and self._take("+"))

    def _counts(self) -> tuple[int, float]:
        end = self._source.find("}", self._pos)
        low, comma, high = self._source[self._pos + 1 : end].partition(",")
        if end < 0 or not low.isdecimal() or not (high.isdecimal() or not high):
            raise Unsupported("a brace that counts nothing")
        self._pos = end + 1
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
            raise Unsupported(f"{char!r} at its position")
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
            raise Unsupported("a group of another kind")
        node = self._alternation()
        self._ignores_case = before
        if not self._take(")"):
            raise Unsupported("a group that does not end")
        if not is_look:
            return node
        while isinstance(node, Concatenation) and len(node.parts) == 1:
            node = node.parts[0]
        if not isinstance(node, Chars):
            raise Unsupported("a look-ahead of more than one character")
        return LookAhead(node)

    def _escape(self) -> Test:
        """Return the set of an escape, after its backslash."""
        char = self._next()
        if char in "pP":
            name = self._next()
            if name == "{":
                end = self._source.find("}", self._pos)
                name, self._pos = self._source[self._pos : end], end + 1
                if end < 0:
                    raise Unsupported("a property that does not end")
            return _category(name, is_negated=char == "P")
        if char.lower() in SETS:
            inner, is_negated = SETS[char.lower()], char.isupper()
            return lambda c: inner(c) != is_negated
        return _char(self._escaped_char(char)).may

    def _escaped_char(self, char: str) -> str:
        if char in CONTROLS:
            return CONTROLS[char]
        if char in "xu":
            digits = self._source[self._pos : self._pos + (2 if char == "x" else 4)]
            if len(digits) < 2 or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise Unsupported("a character by another kind of number")
            self._pos += len(digits)
            return chr(int(digits, 16))
        if char.isalnum():
            raise Unsupported(f"the escape {char!r}")
        return char

    def _set(self) -> Chars:
        is_negated = self._take("^")
        tests = [self._member()]
        while not self._take("]"):
            tests.append(self._member())
        test: Test = lambda c: any(each(c) for each in tests) != is_negated  # noqa: E731 - like its members
        return Chars(test, test)

    def _member(self) -> Test:
        """Return a member of a set: a character, a range, or a set by its escape."""
        char = self._next()
        if char in "[]" or (char == "&" and self._peek() == "&"):
            raise Unsupported("a nested or empty set")
        if char == "\\":
            if self._peek() and self._peek() in "pPsSdDwW":
                return self._escape()
            char = self._escaped_char(self._next())
        if self._peek() != "-" or self._source[self._pos + 1 : self._pos + 2] in ("]", ""):
            return _char(char).may
        self._next()
        last = self._next()
        if last == "\\":
            last = self._escaped_char(self._next())
        if last == "[" or last < char:
            raise Unsupported("an invalid range")
        return lambda c: char <= c <= last
