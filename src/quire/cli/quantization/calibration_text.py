"""The calibration text, as sequences of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quire.errors import ConfigError
from quire.text.documents import bundled_text, encode_lines
from quire.text.tokenizers.tokenizer import Tokenizer

# Maximum number of tokens of a sequence; longer documents are divided.
MAX_SEQUENCE: Final = 512
BUNDLED_TEXT: Final = "calibration.jsonl"
FIELD: Final = "calibration"


def read_sequences(folder: Path, file: Path | None, max_tokens: int, max_length: int) -> list[list[int]]:
    """Read a text as sequences of tokens: each line is a document, and long ones are divided.

    In a file of JSON lines, a document is an object with `text`, or with `messages`, which the chat template renders.
    """
    path = bundled_text(BUNDLED_TEXT) if file is None else file
    tokenizer = Tokenizer.from_folder(folder)
    length = min(MAX_SEQUENCE, max_length)
    sequences: list[list[int]] = []
    left = max_tokens
    try:
        for ids in encode_lines(path, tokenizer, FIELD):
            for start in range(0, min(len(ids), left), length):
                sequences.append(ids[start : start + min(length, left)])
                left -= len(sequences[-1])
            if left <= 0:
                break
    finally:
        tokenizer.close()
    if not sequences:
        raise ConfigError(f"{FIELD} {path} has no line with text", field=FIELD)
    return sequences


def bundled_texts() -> list[str]:
    """Return the lines of the bundled text."""
    return bundled_text(BUNDLED_TEXT).read_text(encoding="utf-8").splitlines()
