"""Control tokens: tokens with which a chat template structures a prompt, so texts of clients may not become them.

Control tokens are the special tokens of a tokenizer, the added tokens that a template writes, such as `<think>` and
`<tool_response>` of Qwen3, and added tokens in bars, such as `<|fim_prefix|>` of Qwen2.5, even if they are not flagged
as special. Tokens of white space, and of one visible character, are always ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import tokenizers

from quire.errors import RequestError
from quire.text.vocabulary.marks import LENIENT, MAX_CHARS, STRICT, MarkedTexts, Marks

STRICT_MARK: Final = re.compile(f"[{chr(STRICT)}-{chr(LENIENT - 1)}]")
# The usual form of markers; some have full-width bars.
IN_BARS: Final = re.compile(r"\s*<[|｜][^<>]+[|｜]>\s*")
# Separates literals; no token has it.
END: Final = "\0"
# Maximum depth of nesting of the expression that matches tokens.
MAX_DEPTH: Final = 50


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The control tokens of a tokenizer and a template.

    Args:
        special: texts of special tokens.
        written: texts of other added tokens that the template writes, or that are in bars. Content of the assistant and
            of the system may contain them, because models write their own markers and instructions name them.
        marks: marks that replace the characters of these tokens in texts of clients.
        marked: characters and texts that get marks.
        pattern: matches the longest of these tokens at each position, as group 1 of an empty match.
    """

    special: frozenset[str]
    written: frozenset[str]
    marks: Marks
    marked: MarkedTexts
    pattern: re.Pattern[str]

    def has(self, token: str) -> bool:
        """Return whether a token is a control token."""
        return token in self.special or token in self.written

    def forbids(self, token: str, text: str, marked: str) -> bool:
        """Return whether a text that matches a token must stay ordinary text, because a client wrote some of it."""
        return marked != text and (token in self.special or STRICT_MARK.search(marked) is not None)

    def forbidden(self, text: str, marked: str) -> Iterator[tuple[int, int]]:
        """Yield the range of each text that matches a token but must stay ordinary text."""
        for match in self.pattern.finditer(text):
            start, end = match.span(1)
            if self.forbids(match[1], match[1], marked[start:end]):
                yield start, end


class AddedTokens:
    """The added tokens of a tokenizer, some of which are control tokens."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        added = [token for token in library.get_added_tokens_decoder().values() if len(token.content.strip()) > 1]
        self._special = frozenset(token.content for token in added if token.special)
        # Tokens that begin or end with a letter or digit are no markers: a template may have such a word in a sentence.
        self._others = [token.content for token in added if not token.special and _is_framed(token.content)]
        self.control_tokens = lru_cache(maxsize=8)(self._control_tokens)

    def _control_tokens(self, literals: tuple[str, ...]) -> ControlTokens:
        """Return the control tokens of a template."""
        text = END.join(literals)
        written = frozenset(token for token in self._others if token in text or IN_BARS.fullmatch(token))
        tokens = self._special | written
        edges = "".join(sorted({char for token in tokens for char in (token.strip()[0], token.strip()[-1])}))
        interiors = tuple(sorted(_interiors(tokens, literals)))
        if len(edges) + len({interior[0] for interior in interiors}) > MAX_CHARS:
            raise RequestError(f"the model's special tokens begin or end with more than {MAX_CHARS} characters")
        marked = MarkedTexts(edges, interiors)
        return ControlTokens(
            self._special, written, Marks(marked), marked, re.compile(f"(?=({longest_of([*tokens])}))")
        )


def _is_framed(token: str) -> bool:
    return not (token.strip()[0].isalnum() or token.strip()[-1].isalnum())


def _interiors(tokens: frozenset[str], literals: Sequence[str]) -> set[str]:
    """Return the texts that become a token between two literals, such as `im_end` between `<|` and `|>`."""
    ends, begins = ("".join(f"{END}{literal}{END}" for literal in literals),) * 2
    first_chars, last_chars = {literal[:1] for literal in literals}, {literal[-1:] for literal in literals}
    before = {token: [i for i in range(1, len(token) - 1) if token[i - 1] in last_chars] for token in tokens}
    after = {token: [i for i in range(2, len(token)) if token[i] in first_chars] for token in tokens}
    is_end = lru_cache(maxsize=None)(lambda part: part + END in ends)
    is_begin = lru_cache(maxsize=None)(lambda part: END + part in begins)
    return {
        token[start:end].strip()
        for token in tokens
        for start in before[token]
        for end in after[token]
        if start < end and token[start:end].strip() and is_end(token[:start]) and is_begin(token[end:])
    }


def longest_of(texts: Sequence[str], depth: int = 0) -> str:
    """Return a regular expression that matches the longest of some texts; without a match, it fails after few steps.

    Texts with a common beginning are tried together, up to a depth that the library's recursion allows.
    """
    if depth > MAX_DEPTH:
        return f"(?:{'|'.join(re.escape(text) for text in sorted(texts, key=len, reverse=True))})"
    rests: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(char) + longest_of(suffixes, depth + 1) for char, suffixes in sorted(rests.items())]
    if not branches:
        return "" if texts else "(?!)"
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")
