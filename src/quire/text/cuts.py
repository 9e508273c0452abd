"""Where a long text can be cut such that the tokens of its pieces are the tokens of the whole.

A text goes through a tokenizer in four steps: added tokens are looked for, a normalizer changes characters, a
pre-tokenizer divides the text into words, and the model makes each word into tokens. A cut between two characters `a`
and `b` changes nothing if no step looks across it:

- no added token holds `a` and `b` side by side, nor ends with `a`: what is behind one is a text of its own;
- the normalizer makes of `a` and of `b` what it makes of them alone;
- the pre-tokenizer begins a word with `b` whatever is around, and finds the same words on each side;
- or it finds the same words but for the one with the cut, and no token of the model holds `a` and `b` side by side:
  then no merge ever goes across.

All four are shown from the tokenizer's own settings, for each pair of characters that a text offers; what is not known
here is taken to look across. What a tokenizer does at the beginning of a text it must not do at a cut: so a piece is
put behind a letter, whose tokens are dropped.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import tokenizers

from quire.text.components import added_tokens, byte_alphabet, normalizers, pre_tokenizers, steps
from quire.text.patterns import Pattern, Unread

# As `ByteLevel` has it built in.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Behind a letter or a digit: what is neither, or a digit behind a letter.
CANDIDATE = re.compile(r"[^\W_](?=\W)|[^\W\d_](?=\d)")
# Pairs that are tried in a part of a text before the next part is; and characters of a part.
MAX_TRIES = 256
PART_CHARS = 1 << 16
BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous", "Removed")
BYTES = {byte: char for char, byte in byte_alphabet().items()}

Pair = tuple[str, str]
# What a pair becomes in a step; None where the step may look across.
Step = Callable[[str, str], Pair | None]


class Cuts:
    """Finds where texts for one tokenizer can be cut.

    Args:
        library: the tokenizer.

    Attributes:
        lead: the letter that pieces are put behind.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._pairs, self._ends = _added(library)
        self.can_cut = lru_cache(maxsize=1 << 14)(self._can_cut)
        try:
            self._steps: list[Step] | None = [_normalizer(step) for step in normalizers(library)]
            self._divides = _divisions(pre_tokenizers(library))
            _check_processors(library)
        except Unread:
            self._steps = None
        letters = string.ascii_lowercase
        self.lead = next((letter for letter in letters if self.can_cut(letter, " ")), letters[0])

    def find(self, text: str, start: int, end: int) -> int | None:
        """Return the first place from `start` on, and before `end`, where a text can be cut, or None."""
        for begin in range(start, end, PART_CHARS):
            found = CANDIDATE.finditer(text, max(begin - 1, 0), min(begin + PART_CHARS, end))
            for _, match in zip(range(MAX_TRIES), found, strict=False):
                place = match.end()
                a, b = text[place - 1], text[place]
                if place >= start and self.can_cut(a, b) and self.can_cut(self.lead, b):
                    return place
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
        # A letter that has become something else may be taken off where it ends a text.
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
        """Say whether no merge of the model goes across a cut within a word."""
        model = self._library.model
        if not isinstance(model, tokenizers.models.BPE) or model.ignore_merges:
            return False
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return False
        # A character without a token of its own is made of bytes, which are other neighbours.
        return all(model.token_to_id(char) is not None for char in (a, b)) and a + b not in self._all_tokens

    @cached_property
    def _all_tokens(self) -> str:
        return "\n\0\n".join(self._library.get_vocab(with_added_tokens=False))


def _added(library: tokenizers.Tokenizer) -> tuple[frozenset[str], frozenset[str]]:
    """Return the neighbours that added tokens hold, as they are looked for, and the characters that they end with."""
    pairs: set[str] = set()
    ends: set[str] = set()
    for forms in added_tokens(library):
        for form in forms:
            pairs.update(map("".join, pairwise(form)))
            ends.update(form[-1:])
    return frozenset(pairs), frozenset(ends)


def _is_settled(char: str) -> bool:
    """Say whether all versions of Unicode say the same of a character, and it joins with nothing before it."""
    category = unicodedata.category(char)
    if category != unicodedata.ucd_3_2_0.category(char) or "\u1100" <= char <= "\u11ff":
        return False
    return category in ("Lu", "Ll", "Lo", "Nd", "Po", "Ps", "Pe", "Pd")


# ---- normalizers ----


def _normalizer(step: dict[str, Any]) -> Step:
    """Return what a normalizer makes of a pair.

    Raises:
        Unread: it is not known.
    """
    match step:
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" as form}:
            return lambda a, b: (a, b) if all(unicodedata.is_normalized(form, char) for char in (a, b)) else None
        case {"type": "Lowercase"}:
            return lambda a, b: (a.lower(), b) if len(a.lower()) == 1 else None
        # What they do they do at the ends of a text, where pieces have a letter.
        case {"type": "Prepend" | "Strip"}:
            return lambda a, b: (a, b)
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return lambda a, b: _replaced(old, new, a, b)
        case {"type": "Replace", "pattern": {"Regex": source}}:
            pattern = Pattern(source)
            return lambda a, b: (a, b) if pattern.can_cut(a, b) and not pattern.can_hold(a, b) else None
        case {"type": "BertNormalizer", "lowercase": lowers}:
            return lambda a, b: _as_bert(a, b, lowers=lowers)
    raise Unread(str(step["type"]))


def _check_processors(library: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer whose templates do anything but put special tokens round a text."""
    for step in steps(library.post_processor, "processors"):
        if step["type"] == "TemplateProcessing" and sum("Sequence" in part for part in step["single"]) != 1:
            raise Unread("a template with another number of texts than one")


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
    """Return what says of a pair whether words begin between its characters, and what it has become.

    None where a step may look across, or find other words elsewhere.

    Raises:
        Unread: a step is not known.
    """
    divisions = [_division(step, is_first=not idx) for idx, step in enumerate(steps)]
    last_bytes = next((idx for idx, step in enumerate(steps) if step["type"] == "ByteLevel"), len(steps))

    def divide(a: str, b: str) -> tuple[bool, Pair] | None:
        for idx, division in enumerate(divisions):
            found = division(a, b)
            if found is None or found[0]:
                return found
            if idx > last_bytes:  # characters that stand for bytes are none that expressions are read for
                return None
            a, b = found[1]
        return False, (a, b)

    return divide


def _division(step: dict[str, Any], *, is_first: bool) -> Callable[[str, str], tuple[bool, Pair] | None]:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": prefix, "use_regex": divides} if is_first or not prefix:
            pattern = Pattern(GPT2_WORDS) if divides else None
            return lambda a, b: _as_bytes(pattern, a, b)
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme, "split": divides} if (
            is_first or scheme == "never"
        ):
            return lambda a, b: (divides and b == " ", (a, mark if b == " " else b)) if mark not in (a, b) else None
        case {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}:
            wanted = Pattern(pattern["Regex"]) if "Regex" in pattern else Pattern.of_text(pattern["String"])
            return lambda a, b: _as_split(wanted, behavior, a, b)
        # Each character alone says where they divide.
        case {"type": "Digits" | "Punctuation"}:
            return lambda a, b: (False, (a, b))
        case {"type": "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer"}:
            return lambda a, b: (True, (a, b)) if b in " \n" else None
    raise Unread(str(step["type"]))


def _as_bytes(pattern: Pattern | None, a: str, b: str) -> tuple[bool, Pair] | None:
    if pattern is not None and not pattern.can_cut(a, b):
        return None
    is_divided = pattern is not None and pattern.always_ends(a, b)
    return is_divided, (BYTES[a.encode()[-1]], BYTES[b.encode()[0]])


def _as_split(pattern: Pattern, behavior: str, a: str, b: str) -> tuple[bool, Pair] | None:
    if not pattern.can_cut(a, b) or behavior not in BEHAVIORS:
        return None
    return behavior == "Isolated" and pattern.always_ends(a, b), (a, b)
