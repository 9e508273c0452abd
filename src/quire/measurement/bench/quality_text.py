"""The text for measurements of quality, as sequences of tokens, and the prompts of greedy outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quire.errors import ConfigError
from quire.text.documents import JSON_LINES, bundled_text, encode_lines, read_text
from quire.text.tokenizers.tokenizer import Tokenizer

# Prose, dialogues, arithmetic, code, data and eleven languages: 3,445 positions of Gemma 3's vocabulary.
BUNDLED_TEXT: Final = "quality.jsonl"
BUNDLED_PROMPTS: Final = "quality_prompts.txt"
FIELD: Final = "text"
# Maximum number of tokens of a sequence, and of a greedy prompt from a text.
MAX_SEQUENCE: Final = 1024
PROMPT_TOKENS: Final = 16


def read_quality_text(tokenizer: Tokenizer, file: Path | None, max_length: int, max_tokens: int) -> list[list[int]]:
    """Read a text as sequences of at least two tokens; long documents are divided.

    Each part begins with the BOS token if the tokenizer adds one.

    Args:
        tokenizer: tokenizer of the model.
        file: a document in plain text, or one document a line of JSON lines (`text` or `messages`); None for the
            bundled text.
        max_length: maximum number of tokens of a sequence.
        max_tokens: maximum number of tokens of all sequences together; 0 for no limit.

    Raises:
        ConfigError: the file cannot be read, has a malformed line, or has no two tokens.
    """
    path = bundled_text(BUNDLED_TEXT) if file is None else file
    sequences: list[list[int]] = []
    left = max_tokens or None
    for ids in _documents(path, tokenizer):
        for part in _parts(ids, tokenizer.bos_token_id, min(MAX_SEQUENCE, max_length)):
            kept = part[:left]
            if len(kept) > 1:
                sequences.append(kept)
                left = None if left is None else left - len(kept)
            if left is not None and left < 2:
                return sequences
    if not sequences:
        raise ConfigError(f"{FIELD} {path} has no text of at least two tokens", field=FIELD)
    return sequences


def bundled_prompts(count: int) -> list[str]:
    """Return the first `count` bundled prompts.

    Raises:
        ConfigError: there are fewer.
    """
    lines = bundled_text(BUNDLED_PROMPTS).read_text(encoding="utf-8").splitlines()
    if count > len(lines):
        raise ConfigError(f"greedy prompts must be at most {len(lines)} without a text, got {count}", field="greedy")
    return lines[:count]


def greedy_prompts(tokenizer: Tokenizer, count: int, sequences: list[list[int]] | None = None) -> list[list[int]]:
    """Return prompts of greedy outputs: bundled ones, or ranges of the sequences at equal distances."""
    if sequences is None:
        return [tokenizer.encode(line) for line in bundled_prompts(count)]
    begin = sequences[0][:1] if sequences[0][0] == tokenizer.bos_token_id else []
    stream = [token_id for ids in sequences for token_id in ids[len(begin) :]]
    width = min(PROMPT_TOKENS, len(stream))
    starts = [idx * (len(stream) - width) // max(1, count - 1) for idx in range(count)]
    return [begin + stream[start : start + width] for start in starts]


def _documents(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    if path.suffix == JSON_LINES:
        return encode_lines(path, tokenizer, FIELD)
    return iter([tokenizer.encode(read_text(path, FIELD))])


def _parts(ids: list[int], bos_token_id: int | None, max_length: int) -> Iterator[list[int]]:
    """Return the parts of a document, each with the BOS token if the document has one."""
    begin = ids[:1] if ids and ids[0] == bos_token_id else []
    text_ids = ids[len(begin) :]
    step = max(1, max_length - len(begin))
    return (begin + text_ids[start : start + step] for start in range(0, len(text_ids), step))
