"""Calibration text, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final

from quire.bounded.files import read_file
from quire.bounded.json_text import parse
from quire.errors import ConfigError, QuireError, shown
from quire.text.tokenizer import Tokenizer

# Maximum number of tokens of a sequence; longer documents are divided.
MAX_SEQUENCE: Final = 512
MAX_TEXT_BYTES: Final = 64 << 20
BUNDLED_TEXT: Final = "calibration.jsonl"
JSON_LINES: Final = ".jsonl"


def read_sequences(folder: Path, file: Path | None, max_tokens: int, max_length: int) -> list[list[int]]:
    """Read a text as sequences of tokens: each line is a document, and long ones are divided.

    In a file of JSON lines, a document is an object with `text`, or with `messages`, which the chat template renders.

    Args:
        folder: folder of the model's tokenizer.
        file: file of the text; None for the bundled text.
        max_tokens: maximum number of tokens of all sequences together.
        max_length: maximum number of tokens of a sequence.

    Raises:
        CheckpointError: the folder has no supported tokenizer.
        ConfigError: the file cannot be read, has no text, or has a malformed line.
    """
    path = _bundled_path() if file is None else file
    try:
        text = read_file(path, MAX_TEXT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration text {path} cannot be read: {error}", field="calibration") from error
    tokenizer = Tokenizer.from_folder(folder)
    length = min(MAX_SEQUENCE, max_length)
    sequences: list[list[int]] = []
    left = max_tokens
    try:
        for ids in _documents(path, text, tokenizer):
            for start in range(0, min(len(ids), left), length):
                sequences.append(ids[start : start + min(length, left)])
                left -= len(sequences[-1])
            if left <= 0:
                break
    finally:
        tokenizer.close()
    if not sequences:
        raise ConfigError(f"calibration text {path} has no line with text", field="calibration")
    return sequences


def bundled_texts() -> list[str]:
    """Return the lines of the bundled text."""
    return _bundled_path().read_text(encoding="utf-8").splitlines()


def _bundled_path() -> Path:
    return Path(str(resources.files("quire").joinpath("bundled", BUNDLED_TEXT)))


def _documents(path: Path, text: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of each document."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = parse(line.encode()) if path.suffix == JSON_LINES else {"text": line}
            yield _encode(document, tokenizer)
        except (QuireError, ValueError) as error:
            raise ConfigError(f"calibration text {path}, line {number}: {error}", field="calibration") from error


def _encode(document: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(document, dict) and isinstance(document.get("text"), str):
        return tokenizer.encode(document["text"])
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ValueError(f"an object with a string text or a list messages is needed, got {shown(document)}")
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(str(each.get("content")) for each in messages))
    rendered = tokenizer.chat_template.render(messages, add_generation_prompt=False)
    return tokenizer.encode(rendered, add_special_tokens=False)
