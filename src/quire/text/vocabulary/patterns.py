r"""Known regular expressions of pre-tokenizers, and the ends of their words, at which a text can be cut.

An expression is known if all its alternatives are. The alternatives are from GPT-2, cl100k, o200k, Llama 3, Qwen,
Tekken, DeepSeek and Falcon, as checkpoints and GGUF files spell them. A match with a letter or a digit ends before
white space, before punctuation except an apostrophe, and between a letter and a digit, without looking ahead. Only runs
of East Asian characters may contain punctuation; they continue after a cut as they would without it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARK: Final = r"[^\r\n\p{L}\p{N}]?"
# Alternatives by the category of characters that they match in any context: all letters, all numbers, or neither.
_PARTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "L": (
            r" ?\p{L}+",
            r"\s?\p{L}+",
            rf"{_MARK}\p{{L}}+",
            rf"{_MARK}+\p{{L}}+",
            rf"{_MARK}+\p{{L}}++",
            rf"{_MARK}[\p{{L}}\p{{M}}]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            *(f"{_MARK}{_UPPER}*{_LOWER}+{end}|{_MARK}{_UPPER}+{_LOWER}*{end}" for end in ("", f"{_CONTRACTIONS}?")),
        ),
        "N": (r"\p{N}", r"\p{N}{1,3}", r"\p{N}{1,3}+", r" ?\p{N}+"),
        "": (
            *(_CONTRACTIONS, "'(?i:[sdmt]|ll|ve|re)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
            *(rf" ?[^\s\p{{L}}\p{{N}}]{end}" for end in ("+", r"+[\r\n]*", r"++[\r\n]*", r"++[\r\n]*+", r"+[\r\n/]*")),
            *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*", r"\s?\p{P}+"),
            *(r"\s+", r"\s", r"\s++$", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"[\r\n]", "[\r\n]"),
            *("[一-龥\u3040-ゟ\u30a0-ヿ]+", "[一-龥\u0800-一\uac00-\ud7ff]+", r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"),
            "[0-9][0-9][0-9]",
        ),
    }
)
GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Unsupported(ValueError):
    """A step of a tokenizer is not among the known ones."""


class WordEnds:
    """Ends of the words that a known expression finds."""

    def __init__(self, source: str) -> None:
        kinds, alternatives, start = set[str](), source + "|", 0
        while start < len(alternatives):
            candidates = ((kind, part) for kind, parts in _PARTS.items() for part in parts)
            match = next(
                ((kind, part) for kind, part in candidates if alternatives.startswith(part + "|", start)), None
            )
            if match is None:
                raise Unsupported("an unknown regular expression")
            kinds.add(match[0])
            start += len(match[1]) + 1
        self._kinds = frozenset(kinds)

    def ends(self, a: str, b: str) -> bool | None:
        """Return True if a word ends between two adjacent characters in any context; else False, or None if unknown."""
        kind, after = unicodedata.category(a)[0], unicodedata.category(b)
        is_apart = b in " \n" or (after[0] == "P" and b != "'") or (kind == "L" and after == "Nd")
        return kind in self._kinds if kind in ("L", "N") and is_apart else None
