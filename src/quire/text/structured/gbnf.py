"""GBNF, llama.cpp's form of EBNF, prepared for the converter to Lark in `llguidance`.

That converter writes characters by code wrongly, mistakes a rule `start` for Lark's, and maps different names to one.
So names are replaced by numbers here, and codes of characters by the characters.

Source: grammars/README.md of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module

from quire.errors import describe

RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
# Comments, texts, classes of characters, counts of repetitions, and names.
TOKENS = re.compile(
    r"(?P<comment>#[^\r\n]*)|(?P<text>\"(?:\\.|[^\"\\])*\")|(?P<chars>\[(?:\\.|[^\]\\])*\])|(?P<count>\{[^}]*\})"
    r"|(?P<name>[\w-]+)",
    re.DOTALL,
)
CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
OPERATORS = {"&": r"\x26", "~": r"\x7e", "--": r"-\x2d"}
IN_CLASS = re.compile(f"{CODE.pattern}|--|[&~]", re.DOTALL)
ROOT = "root"


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is written in GBNF, not in Lark."""
    return RULE.search(text) is not None


def as_lark(text: str) -> str:
    """Convert a grammar from GBNF to Lark."""
    defined = set(RULE.findall(text))
    if ROOT not in defined:
        raise ValueError("read as GBNF: there is no rule root")
    numbers: dict[str, str] = {ROOT: ROOT}

    def plain(match: re.Match[str]) -> str:
        kind, token = match.lastgroup, match[0]
        if kind == "name":
            if token not in defined:
                raise ValueError(f"read as GBNF: there is no rule {token}")
            return numbers.setdefault(token, f"r{len(numbers)}")
        if kind in ("text", "chars"):
            return CODE.sub(_text_char, token) if kind == "text" else IN_CLASS.sub(_class_char, token)
        return "" if kind == "comment" else token

    convert: Callable[[str], object] = import_module("llguidance.gbnf_to_lark").gbnf_to_lark
    try:
        return str(convert(TOKENS.sub(plain, text)))
    except ValueError:
        raise
    except Exception as error:  # the converter raises plain exceptions
        raise ValueError(f"read as GBNF: {describe(error)}") from error


def _text_char(match: re.Match[str]) -> str:
    """Return the replacement of an escape in a text; brackets need no escape there."""
    return match[4] if match[4] in ("[", "]") else _char(match)


def _class_char(match: re.Match[str]) -> str:
    """Return the replacement of an escape in a class, or of an operator on classes in Rust, as a code."""
    return OPERATORS.get(match[0]) or _char(match)


def _char(match: re.Match[str]) -> str:
    """Return the character of an escape by code; other escapes, and ASCII characters, which may be syntax, stay."""
    code = match[1] or match[2] or match[3]
    if code is None:
        return match[0]
    number = int(code, 16)
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
        raise ValueError(f"read as GBNF: {match[0]} is no character")
    return f"\\x{number:02x}" if number < 0x80 else chr(number)
