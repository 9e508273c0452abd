"""Positions at which a long text can be cut such that the tokens of its pieces are the tokens of the whole.

A tokenizer works in four steps: it matches added tokens, a normalizer changes characters, a pre-tokenizer divides the
text into words, and the model divides each word into tokens. A cut between two characters `a` and `b` changes nothing
if no step depends on both sides:

- no added token contains `a` directly before `b`, or ends with `a`: the text after an added token is tokenized alone;
- the normalizer changes `a` and `b` independently of each other;
- the pre-tokenizer begins a word at `b` in any context, and finds the same words on each side;
- or it finds the same words except the one with the cut, and no token of the model contains `a` directly before `b`:
  then no merge crosses the cut.

The conditions follow from the tokenizer's settings for each candidate pair of a text. A tokenizer with an unknown step,
or an unknown regular expression, has no cuts: its texts are tokenized whole. Since a tokenizer treats the beginning of
a text in a special way, each later piece is encoded after a lead letter, whose tokens are dropped.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import tokenizers

from quire.text.vocabulary.components import added_tokens, byte_alphabet, normalizers, pre_tokenizers, steps
from quire.text.vocabulary.patterns import GPT2, Unsupported, WordEnds

# A position between a letter or digit and a character of another kind, or between a letter and a digit.
CANDIDATE = re.compile(r"[^\W_](?=\W)|[^\W\d_](?=\d)")
# Maximum number of pairs that are tried in one part of a text, and number of characters of a part.
MAX_TRIES = 256
PART_CHARS = 1 << 16
BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous", "Removed")
BYTES = {byte: char for char, byte in byte_alphabet().items()}

Pair = tuple[str, str]
# Returns a pair after a normalizer's step; None if the step may depend on both characters.
Step = Callable[[str, str], Pair | None]


class Cuts:
    """Finds the positions at which the texts of one tokenizer can be cut."""

    def __init__(self, library: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
        self._library = library
        # A text in which pairs of characters are searched; built here, since it takes long.
        self._all_tokens = "\n\0\n".join(tokens) if _has_plain_merges(library.model) else ""
        self._pairs, self._ends = _added(library)
        self.can_cut = lru_cache(maxsize=1 << 14)(self._can_cut)
        try:
            self._steps: list[Step] | None = [_normalizer(step) for step in normalizers(library)]
            self._divides = _divisions(pre_tokenizers(library))
            _check_processors(library)
        except Unsupported:
            self._steps = None
        letters = string.ascii_lowercase
        self.lead = next((letter for letter in letters if self.can_cut(letter, " ")), letters[0])

    def find(self, text: str, start: int, end: int) -> int | None:
        """Return the first position in `[start, end)` at which a text can be cut, or None."""
        for begin in range(start, end, PART_CHARS):
            matches = CANDIDATE.finditer(text, max(begin - 1, 0), min(begin + PART_CHARS, end))
            for _, match in zip(range(MAX_TRIES), matches, strict=False):
                pos = match.end()
                a, b = text[pos - 1], text[pos]
                if pos >= start and self.can_cut(a, b) and self.can_cut(self.lead, b):
                    return pos
        return None

    def _can_cut(self, a: str, b: str) -> bool:
        if self._steps is None or not _is_settled(a) or not (_is_settled(b) or b in " \n"):
            return False
        image = a, b
        for step in self._steps:
            changed = step(*image)
            if changed is None:
                return False
            image = changed
        # A letter that became another kind of character may be stripped at the end of a text.
        if not image[0].isalnum():
            return False
        if any(pair[0] in self._ends or "".join(pair) in self._pairs for pair in ((a, b), image)):
            return False
        divided = self._divides(*image)
        if divided is None:
            return False
        is_between_words, image = divided
        if self._is_random:
            return False
        return is_between_words or self._is_in_no_token(*image)

    @cached_property
    def _is_random(self) -> bool:
        return any(getattr(self._library.model, name, None) for name in ("dropout", "alpha", "nbest_size"))

    def _is_in_no_token(self, a: str, b: str) -> bool:
        """Return whether no merge of the model crosses a cut within a word."""
        model = self._library.model
        if not _has_plain_merges(model):
            return False
        # A character without a token of its own is split into bytes, whose merges are not checked here.
        return all(model.token_to_id(char) is not None for char in (a, b)) and a + b not in self._all_tokens


def _has_plain_merges(model: Any) -> bool:
    """Return whether a model divides a word by merges alone, without prefixes or suffixes in its tokens."""
    if not isinstance(model, tokenizers.models.BPE) or model.ignore_merges:
        return False
    return not model.continuing_subword_prefix and not model.end_of_word_suffix


def _added(library: tokenizers.Tokenizer) -> tuple[frozenset[str], frozenset[str]]:
    """Return the pairs of adjacent characters in added tokens, and the last characters of added tokens."""
    pairs: set[str] = set()
    ends: set[str] = set()
    for forms in added_tokens(library):
        for form in forms:
            pairs.update(map("".join, pairwise(form)))
            ends.update(form[-1:])
    return frozenset(pairs), frozenset(ends)


def _is_settled(char: str) -> bool:
    """Return whether a character has one category in all Unicode versions, and never composes with a previous one."""
    category = unicodedata.category(char)
    if category != unicodedata.ucd_3_2_0.category(char) or "\u1100" <= char <= "\u11ff":
        return False
    return category in ("Lu", "Ll", "Lo", "Nd", "Po", "Ps", "Pe", "Pd")


# ---- normalizers ----


def _normalizer(step: dict[str, Any]) -> Step:
    """Return the function that applies a normalizer to a pair."""
    match step:
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" as form}:
            return lambda a, b: (a, b) if all(unicodedata.is_normalized(form, char) for char in (a, b)) else None
        case {"type": "Lowercase"}:
            return lambda a, b: (a.lower(), b) if len(a.lower()) == 1 else None
        # They act only at the ends of a text, and a piece has a letter at a cut.
        case {"type": "Prepend" | "Strip"}:
            return lambda a, b: (a, b)
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return lambda a, b: _replaced(old, new, a, b)
        case {"type": "BertNormalizer", "lowercase": lowers}:
            return lambda a, b: _as_bert(a, b, lowers=lowers)
    raise Unsupported(str(step["type"]))


def _check_processors(library: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer whose templates do not contain the text exactly once."""
    for step in steps(library.post_processor, "processors"):
        if step["type"] == "TemplateProcessing" and sum("Sequence" in part for part in step["single"]) != 1:
            raise Unsupported("a template with another number of texts than one")


def _replaced(old: str, new: str, a: str, b: str) -> Pair | None:
    if old not in (a, b):
        return None if a in old or b in old else (a, b)
    return (new if old == a else a, new if old == b else b) if len(new) == 1 else None


def _as_bert(a: str, b: str, *, lowers: bool) -> Pair | None:
    if a not in string.ascii_letters or not b.isascii():
        return None
    return (a.lower() if lowers else a, " " if b == "\n" else b)


# ---- pre-tokenizers ----


def _divisions(steps: list[dict[str, Any]]) -> Callable[[str, str], tuple[bool, Pair] | None]:
    """Return a function that returns whether a word begins between the characters of a pair, and the changed pair.

    The function returns None if a step may depend on both sides, or find other words elsewhere.
    """
    divisions = [_division(step, is_first=not idx) for idx, step in enumerate(steps)]
    last_bytes = next((idx for idx, step in enumerate(steps) if step["type"] == "ByteLevel"), len(steps))

    def divide(a: str, b: str) -> tuple[bool, Pair] | None:
        for idx, division in enumerate(divisions):
            outcome = division(a, b)
            if outcome is None or outcome[0]:
                return outcome
            if idx > last_bytes:  # expressions are not analysed for characters that represent bytes
                return None
            a, b = outcome[1]
        return False, (a, b)

    return divide


def _division(step: dict[str, Any], *, is_first: bool) -> Callable[[str, str], tuple[bool, Pair] | None]:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": prefix, "use_regex": divides} if is_first or not prefix:
            words = WordEnds(GPT2) if divides else None
            return lambda a, b: _as_bytes(words, a, b)
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme, "split": divides} if (
            is_first or scheme == "never"
        ):
            return lambda a, b: (divides and b == " ", (a, mark if b == " " else b)) if mark not in (a, b) else None
        case {"type": "Split", "pattern": {"Regex": source}, "behavior": behavior, "invert": False}:
            split = WordEnds(source)
            return lambda a, b: _as_split(split, behavior, a, b)
        case {"type": "Split", "pattern": {"String": text}, "behavior": behavior, "invert": False}:
            return lambda a, b: (False, (a, b)) if behavior in BEHAVIORS and not (a in text and b in text) else None
        # They divide at single characters, independent of the context.
        case {"type": "Digits" | "Punctuation"}:
            return lambda a, b: (False, (a, b))
        case {"type": "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer"}:
            return lambda a, b: (True, (a, b)) if b in " \n" else None
    raise Unsupported(str(step["type"]))


def _as_bytes(words: WordEnds | None, a: str, b: str) -> tuple[bool, Pair] | None:
    is_divided = words is not None and words.ends(a, b)
    return None if is_divided is None else (is_divided, (BYTES[a.encode()[-1]], BYTES[b.encode()[0]]))


def _as_split(words: WordEnds, behavior: str, a: str, b: str) -> tuple[bool, Pair] | None:
    is_divided = words.ends(a, b)
    if is_divided is None or behavior not in BEHAVIORS:
        return None
    return behavior == "Isolated" and is_divided, (a, b)
