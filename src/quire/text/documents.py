"""Documents that are read from text files, for calibrations and for measurements of quality."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final

from quire.errors import ConfigError, QuireError, shown
from quire.platform.bounded.files import read_file, reason_of
from quire.platform.bounded.json_text import parse
from quire.text.tokenizers.tokenizer import Tokenizer

MAX_TEXT_BYTES: Final = 64 << 20
JSON_LINES: Final = ".jsonl"


def bundled_text(name: str) -> Path:
    """Return the path of a text file that the package ships."""
    return Path(str(resources.files("quire.models").joinpath("bundled", name)))


def read_text(path: Path, field: str) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: the file cannot be read, is too large or is not UTF-8; it names `field`.
    """
    try:
        return read_file(path, MAX_TEXT_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field} {path} cannot be read: {reason_of(error)}", field=field) from error


def encode_lines(path: Path, tokenizer: Tokenizer, field: str) -> Iterator[list[int]]:
    """Yield the tokens of each document of a file: one document per line that is not blank.

    In a file of JSON lines, a document is an object with `text`, or with `messages`, which the chat template renders.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed; it names `field`.
    """
    for number, line in enumerate(read_text(path, field).split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = parse(line.encode()) if path.suffix == JSON_LINES else {"text": line}
            yield _encode(document, tokenizer)
        except (QuireError, ValueError) as error:
            raise ConfigError(f"{field} {path}, line {number}: {error}", field=field) from error


def _encode(document: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(document, dict) and isinstance(document.get("text"), str):
        return tokenizer.encode(document["text"])
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"an object with a string text or a list messages is needed, got {shown(document)}")
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(str(message.get("content")) for message in messages))
    prompt = tokenizer.chat_template.prompt(messages, add_generation_prompt=False, added_tokens=tokenizer.added_tokens)
    return tokenizer.encode(prompt, add_special_tokens=False)
