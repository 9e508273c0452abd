"""Conversion of regular expressions of JSON schemas (ECMA-262) to the part of Rust's syntax that `llguidance` compiles.

Dialects and validators differ in the characters of a class like `\\s` or `.`. So a class has only characters that both
ECMA-262 and Python's `re` allow, and a text that matches the expression is valid in both.

Source: ECMA-262, section 22.2 and annex B.1.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from quire.text.schemas.document import SchemaError
from quire.text.schemas.keywords import MAX_COUNT

ANY_TEXT = "(?s:.*)"
ANY_CHAR = r"[^\n\r\x{2028}\x{2029}]"
# Characters of a class by its letter: `NARROW` has those that all dialects include, `WIDE` those that any dialect
# includes, for negated classes.
SPACES = r"\t\n\x{b}\f\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
MORE_SPACES = SPACES + r"\x{1c}-\x{1f}\x{85}\x{feff}"
NARROW = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": SPACES,
    "D": r"\P{Nd}",
    "W": r"[^\p{L}\p{N}\p{M}_]",
    "S": f"[^{MORE_SPACES}]",
}
WIDE = {
    "d": r"\p{Nd}",
    "w": r"\p{L}\p{N}\p{M}_",
    "s": MORE_SPACES,
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": f"[^{SPACES}]",
}
CONTROLS = {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
COUNTED = re.compile(r"\{(\d+)(,(\d*))?\}")
NAMED_GROUP = re.compile(r"\?P?<[A-Za-z_$][\w$]*>")
PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}")
CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
LOOK_AROUND = {"?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind"}
MAX_DEPTH = 100
MAX_OTHERS_CHARS = 20_000
META = frozenset("\\.+*?()|[]{}^$#&-~/")
LOW_SURROGATE = re.compile(r"\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)


class Term(NamedTuple):
    """A part of an expression in Rust's syntax.

    Args:
        text: the part, without anchors; among alternatives, one without an anchor begins or ends with any text.
        has_start, has_end: True if the part contains `^` or `$`.
        is_empty: True if the part matches no character.
    """

    text: str
    has_start: bool = False
    has_end: bool = False
    is_empty: bool = False


def to_rust(pattern: str) -> str:
    """Return an expression in Rust's syntax, of printable ASCII characters, with escaped slashes.

    It matches whole texts of which the original matches a part.
    """
    reader = _PatternReader(pattern)
    text = reader.alternatives(0, is_whole=True).text
    if reader.pos < len(pattern):
        raise SchemaError(f"the regular expression {pattern!r} has a bracket too many")
    return text


def quoted(text: str) -> str:
    """Return an expression in Rust's syntax for a literal text."""
    return "".join(map(_literal, text))


def other_than(texts: Iterable[str]) -> str:
    """Return an expression in Rust's syntax for all texts except some."""
    names = set(texts)
    followers: dict[str, set[str]] = {}
    for name in names:
        for idx in range(len(name) + 1):
            followers.setdefault(name[:idx], set()).update(name[idx : idx + 1])
        if sum(map(len, followers)) > MAX_OTHERS_CHARS:
            raise SchemaError("the texts that are not allowed are long")
    options = []
    for begin, chars in sorted(followers.items()):
        suffix = f"[^{quoted(''.join(sorted(chars)))}]{ANY_TEXT}" if chars else "(?s:.+)"
        options.append(f"{quoted(begin)}{suffix}")
        if begin not in names:
            options.append(quoted(begin))
    return "|".join(options)


class _PatternReader:
    """Reads an expression from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.pos = 0

    def alternatives(self, depth: int, *, is_whole: bool = False) -> Term:
        """Read alternatives up to a closing bracket."""
        if depth > MAX_DEPTH:
            raise self._error("nests too deeply")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        has_start, has_end = any(term.has_start for term in options), any(term.has_end for term in options)
        texts = []
        for term in options:
            begin = ANY_TEXT if (is_whole or has_start) and not term.has_start else ""
            end = ANY_TEXT if (is_whole or has_end) and not term.has_end else ""
            texts.append(f"{begin}{term.text}{end}")
        return Term("|".join(texts), has_start, has_end, all(term.is_empty for term in options))

    def _sequence(self, depth: int) -> Term:
        terms: list[Term] = []
        while self.pos < len(self._pattern) and self._pattern[self.pos] not in "|)":
            terms.append(self._quantified(depth))
        for idx, term in enumerate(terms):
            is_late = term.has_start and not all(before.is_empty for before in terms[:idx])
            is_early = term.has_end and not all(after.is_empty for after in terms[idx + 1 :])
            if is_late or is_early:
                raise self._error("has an anchor that is not at one of its ends")
        return Term(
            "".join(term.text for term in terms),
            any(term.has_start for term in terms),
            any(term.has_end for term in terms),
            all(term.is_empty for term in terms),
        )

    def _quantified(self, depth: int) -> Term:
        term = self._term(depth)
        counts = self._quantifier()
        if not counts:
            return term
        if term.has_start or term.has_end:
            raise self._error("repeats an anchor")
        if self._take("+") or self._quantifier():
            raise self._error("has two quantifiers in a row")
        return Term(f"{term.text}{counts}")

    def _quantifier(self) -> str:
        """Read a quantifier; a lazy one matches the same texts."""
        pattern = self._pattern
        counted = COUNTED.match(pattern, self.pos)
        if counted is not None:
            self.pos = counted.end()
            least, most = float(counted[1]), float(counted[3] or counted[1])
            if least > most or most > MAX_COUNT:
                raise self._error(f"has the quantifier {counted[0]}")
            counts = counted[0]
        elif pattern[self.pos : self.pos + 1] in ("*", "+", "?"):
            counts = pattern[self.pos]
            self.pos += 1
        else:
            return ""
        self._take("?")
        return counts

    def _term(self, depth: int) -> Term:
        char = self._pattern[self.pos]
        self.pos += 1
        if char in "^$":
            return Term("", has_start=char == "^", has_end=char == "$", is_empty=True)
        if char == ".":
            return Term(ANY_CHAR)
        if char == "(":
            return self._group(depth)
        if char == "[":
            return Term(self._char_class())
        if char == "\\":
            kind, value = self._escape()
            return Term(
                f"[{NARROW[value]}]" if kind == "class" else _literal(value) if kind == "char" else f"\\{value}"
            )
        if char in "*+?":
            raise self._error(f"has nothing before {char}")
        if char == "{" and self._pattern.startswith(",", self.pos):
            raise self._error("has a quantifier without its first number")
        return Term(_literal(char))

    def _group(self, depth: int) -> Term:
        pattern = self._pattern
        for mark, name in LOOK_AROUND.items():
            if pattern.startswith(mark, self.pos):
                raise self._error(f"has a {name}")
        flags = "(?:"
        named = NAMED_GROUP.match(pattern, self.pos)
        if named is not None:
            self.pos = named.end()
        elif self._take("?i)"):
            if self.pos > len("(?i)"):
                raise self._error("sets a flag in its middle")
            return Term("(?i)", is_empty=True)
        elif self._take("?i:"):
            flags = "(?i:"
        elif not self._take("?:") and pattern.startswith("?", self.pos):
            raise self._error("has a group of an unknown kind")
        inner = self.alternatives(depth + 1)
        if not self._take(")"):
            raise self._error("has a bracket that is not closed")
        return inner._replace(text=f"{flags}{inner.text})")

    def _char_class(self) -> str:
        is_negated = self._take("^")
        classes, items = WIDE if is_negated else NARROW, ""
        while not self._take("]"):
            kind, first = self._class_atom()
            is_range = self._pattern.startswith("-", self.pos) and not self._pattern.startswith("-]", self.pos)
            if not is_range or kind != "char":
                items += classes[first] if kind == "class" else _literal(first) if kind == "char" else f"\\{first}"
                continue
            self.pos += 1
            kind, last = self._class_atom()
            if kind != "char":
                items += f"{_literal(first)}\\-" + (classes[last] if kind == "class" else f"\\{last}")
            elif first > last:
                raise self._error(f"has the range {first}-{last}")
            else:
                items += f"{_literal(first)}-{_literal(last)}"
        if not items:
            if is_negated:
                return "(?s:.)"
            raise self._error("has an empty class, which matches nothing")
        return f"[{'^' if is_negated else ''}{items}]"

    def _class_atom(self) -> tuple[str, str]:
        if self.pos >= len(self._pattern):
            raise self._error("has a class that is not closed")
        char = self._pattern[self.pos]
        self.pos += 1
        if char != "\\":
            return "char", char
        if self._take("b"):
            return "char", "\b"
        return self._escape()

    def _escape(self) -> tuple[str, str]:
        """Read an escape after its backslash: a "char", a "class" of `NARROW`, or a "property" of characters."""
        pattern = self._pattern
        char = pattern[self.pos : self.pos + 1]
        if char in NARROW and char:
            self.pos += 1
            return "class", char
        match = PROPERTY.match(pattern, self.pos)
        if match is not None:
            self.pos = match.end()
            return "property", match[0]
        code = self._code()
        if code is not None:
            return "char", code
        self.pos += 1
        if char in CONTROLS and char and not (char == "0" and pattern[self.pos : self.pos + 1].isdigit()):
            return "char", CONTROLS[char]
        if char == "c" and re.match("[A-Za-z]", pattern[self.pos : self.pos + 1]):
            self.pos += 1
            return "char", chr(ord(pattern[self.pos - 1]) % 32)
        if char in ("b", "B"):
            raise self._error("has a word boundary")
        if char.isdigit() or char == "k":
            raise self._error("has a back-reference")
        if not char or char.isalnum():
            raise self._error(f"has the escape \\{char}")
        return "char", char

    def _code(self) -> str | None:
        """Read a character's code; two halves of a surrogate pair are one character."""
        match = CODE.match(self._pattern, self.pos)
        if match is None:
            return None
        self.pos = match.end()
        code = int(match[1] or match[2] or match[3], 16)
        after = LOW_SURROGATE.match(self._pattern, self.pos)
        if 0xD800 <= code < 0xDC00 and after is not None:
            self.pos = after.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(after[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self._error("has half of a surrogate pair")
        return chr(code)

    def _take(self, text: str) -> bool:
        is_there = self._pattern.startswith(text, self.pos)
        if is_there:
            self.pos += len(text)
        return is_there

    def _error(self, reason: str) -> SchemaError:
        return SchemaError(f"the regular expression {self._pattern!r} {reason}")


def _literal(char: str) -> str:
    """Return the expression of one character, valid inside and outside a class."""
    if char in META:
        return f"\\{char}"
    return char if char.isascii() and char.isprintable() else f"\\x{{{ord(char):x}}}"
