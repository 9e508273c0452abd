"""Bounds from a tokenizer's settings alone: the fewest tokens of a text, and the growth of a text by normalization."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import tokenizers

from quire.errors import CheckpointError, shown
from quire.platform.bounded.json_text import parse
from quire.text.vocabulary.components import (
    added_tokens,
    byte_alphabet,
    decoders,
    guarded,
    normalizers,
    pre_tokenizers,
    steps,
)

# Maximum characters of a text that are normalized at a time, to measure the result.
PART_CHARS = 1 << 10

# Maximum number of characters that a normal form joins to one.
JOINED_CHARS = 4
# Maximum of a setting that applies to each character, word or token of a text.
MAX_SETTING = 1000
# Maximum growth of one byte by normalizer and pre-tokenizer; known tokenizers reach some thousands.
MAX_GROWTH = 1 << 17
# Maximum growth of one byte by each normalizer.
FORM_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 11, "NFKD": 11, "Lowercase": 3, "BertNormalizer": 4}
LOSSLESS_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend"})
LOSSLESS_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits"})
FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})


class LeastTokens(NamedTuple):
    """A lower bound on the number of tokens of a text.

    Args:
        per_token: maximum number of bytes (or characters) of a text in one token.
        counts_bytes: True if `per_token` counts bytes, False if it counts characters.
        stripping: added tokens that absorb adjacent spaces; a text with one of them has no bound.
    """

    per_token: int
    counts_bytes: bool
    stripping: tuple[str, ...]

    def of(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text, without the special tokens around it."""
        if any(token in text for token in self.stripping):
            return 0
        length = len(text.encode("utf-8", "surrogatepass")) if self.counts_bytes else len(text)
        return -(-length // self.per_token)


def least_tokens(library: tokenizers.Tokenizer, tokens: Sequence[str]) -> LeastTokens | None:
    """Return the bound of a tokenizer; None if it may drop any part of a text.

    A normalizer or pre-tokenizer may drop or join characters; a model without a token for a character may drop it, or
    make one token of consecutive unknown characters.
    """
    forms = [step["type"] for step in normalizers(library) if not _lengthens(step)]
    words = pre_tokenizers(library)
    if not LOSSLESS_NORMALIZERS.issuperset(forms) or not all(map(_is_lossless, words)):
        return None
    is_byte_level = any(step["type"] == "ByteLevel" for step in words)
    if not tokens or not _covers_all(library.model, is_byte_level=is_byte_level):
        return None
    # A byte of a token is a byte of the text only without a normalizer.
    counts_bytes = is_byte_level and not normalizers(library)
    added = list(library.get_added_tokens_decoder().values())
    stripping = [token for token in added if token.lstrip or token.rstrip]
    if any(token.normalized for token in stripping):
        return None
    longest = max(max(map(len, tokens)), *(len(token.content.encode()) for token in added), 0)
    joined = JOINED_CHARS if FORMS.intersection(forms) else 1
    return LeastTokens(longest * joined, counts_bytes, tuple(token.content for token in stripping))


def _lengthens(step: dict[str, Any]) -> bool:
    """Return whether a step replaces a string by a string that is not shorter."""
    old = step.get("pattern", {}).get("String")
    return step["type"] == "Replace" and bool(old) and len(step["content"]) >= len(old)


def _is_lossless(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer preserves every character."""
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed" and not step.get("invert", False)
    return step["type"] in LOSSLESS_PRE_TOKENIZERS


def _covers_all(model: Any, *, is_byte_level: bool) -> bool:
    """Return whether each character, or each of its bytes, has at least one token of its own in the output."""
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        return all(model.token_to_id(char) is not None for char in byte_alphabet())
    if model.byte_fallback:
        return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return model.unk_token is not None and not model.fuse_unk


def check_source(raw: bytes) -> None:
    """Refuse a `tokenizer.json` for which the library would allocate more memory than the file has bytes.

    A SentencePiece map of characters declares the length of its table, which the library does not check.
    """
    # Few tokenizers have a map, and only an escape could hide its name.
    if b"Precompiled" not in raw and b"\\u" not in raw:
        return
    tokenizer = parse(raw, is_strict=False)
    left = [tokenizer.get("normalizer")] if isinstance(tokenizer, dict) else []
    while left:
        step = left.pop()
        if isinstance(step, dict):
            inner = step.get("normalizers")
            left += inner if isinstance(inner, list) else []
            if "precompiled_charsmap" in step and _table_bytes(step["precompiled_charsmap"]) > len(raw):
                raise CheckpointError("the tokenizer's precompiled_charsmap is longer than its file")


def _table_bytes(charsmap: object) -> int:
    """Return the length that a map of characters declares for its table."""
    head = bytes(charsmap[:4]) if isinstance(charsmap, list) and _are_bytes(charsmap[:4]) else b""
    if isinstance(charsmap, str):
        head = base64.b64decode(charsmap[:8])[:4]
    return int.from_bytes(head, "little")


def _are_bytes(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 256 for value in values)


def check_settings(library: tokenizers.Tokenizer) -> None:
    """Refuse settings with which a short text would take much time or memory."""
    model = library.model
    sizes = {"special tokens around a text": library.num_special_tokens_to_add(False)}
    sizes["characters of a word"] = getattr(model, "max_input_chars_per_word", 0)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        sizes[f"characters of {name}"] = len(getattr(model, name, None) or "")
    for step in decoders(library):
        for name in ("content", "prefix", "start", "stop"):
            value = step.get(name, "")
            sizes[f"decoder's {name}"] = value if isinstance(value, int) else len(value)
    for step in steps(library.post_processor, "processors"):
        sizes["parts of a template"] = len(step.get("single", ()))
    for name, size in sizes.items():
        if size > MAX_SETTING:
            raise CheckpointError(f"the tokenizer's {name}: {size} are more than {MAX_SETTING}")
    num_bytes = growth(library)
    if num_bytes > MAX_GROWTH:
        raise CheckpointError(f"the tokenizer's normalizer can make {num_bytes} bytes of one: {MAX_GROWTH} at most")
    for content, normal in added_tokens(library):
        if content and not normal:
            # The library would search for an empty string without end.
            raise CheckpointError(f"the tokenizer's added token {shown(content)}: its normal form is empty")


def growth(library: tokenizers.Tokenizer) -> int:
    """Return the maximum number of bytes that normalizer and pre-tokenizer make of one byte."""
    return prod(map(_growth, (*normalizers(library), *pre_tokenizers(library))))


def fits_normalized(library: tokenizers.Tokenizer, text: str, limit: int) -> bool:
    """Return whether normalizer and pre-tokenizer make at most `limit` bytes of a text, by an upper bound.

    The text is normalized in parts that become no longer than `limit`, or than one character does, and only as far as
    it fits.
    """
    normalizer = library.normalizer
    num_chars = min(PART_CHARS, max(1, limit // (4 * prod(map(_growth, normalizers(library))))))
    left = limit // prod(map(_growth, pre_tokenizers(library)))
    for start in range(0, len(text), num_chars):
        part = text[start : start + num_chars]
        left -= len((part if normalizer is None else guarded(normalizer.normalize_str, part)).encode())
        if left < 0:
            return False
    return True


def _growth(step: dict[str, Any]) -> int:
    match step:
        case {"type": "Prepend", "prepend": text}:
            return 1 + len(text.encode())
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return max(1, -(-len(new.encode()) // max(1, len(old.encode())))) + (not old) * len(new.encode())
        case {"type": "Replace", "content": new}:
            # An expression may match every byte, and the empty strings between them.
            return 1 + len(new.encode())
        case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
            return _longest_replacement(charsmap)
        case {"type": "ByteLevel"}:
            return 2
        case {"type": "Metaspace", "replacement": mark}:
            return len(mark.encode())
    return FORM_GROWTH.get(step["type"], 1)


def _longest_replacement(charsmap: Any) -> int:
    """Return the bytes of the longest replacement in a SentencePiece map of characters."""
    try:
        raw = base64.b64decode(charsmap)
    except (TypeError, binascii.Error):
        return 1
    trie_bytes = int.from_bytes(raw[:4], "little")
    return max(1, *(len(part) for part in re.split(b"\0", raw[4 + trie_bytes :])))
