"""The files of a model's tokenizer: tokenizer.json, tokenizer_config.json and chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers

from quire.errors import CheckpointError
from quire.platform.bounded.files import read_file, read_json
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tokenizers.tokenizer_json import JsonSource
from quire.text.vocabulary.bounds import check_source
from quire.text.vocabulary.components import guarded

# Maximum sizes of a checkpoint's files; the largest published tokenizers have 35 MB.
MAX_TOKENIZER_BYTES = 128 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20
# Files of a folder from which a tokenizer and its chat template are read.
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)


class TokenizerFiles(NamedTuple):
    """The parts of a tokenizer that were read from a checkpoint's files.

    Args:
        path: path of `tokenizer.json`, or of a GGUF file.
        library: tokenizer of the `tokenizers` library.
        bos_token: token that begins a text, or None.
        eos_token: token that ends a text, or None.
        chat_template: the model's chat template, or None.
        doubles: ids of duplicate tokens, which are decoded but never encoded, mapped to the id of the same text.
        json_source: file from which another process can read the tokenizer, or None.
    """

    path: Path
    library: tokenizers.Tokenizer
    bos_token: str | None
    eos_token: str | None
    chat_template: ChatTemplate | None
    doubles: Mapping[int, int] = MappingProxyType({})
    json_source: JsonSource | None = None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a checkpoint's folder; `tokenizer_config.json` and `chat_template.jinja` are optional."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{file} does not exist: the model needs a tokenizer of the `tokenizers` library "
            "(set skip_tokenizer_init to work on token ids only)"
        )
    config = _read_config(folder / "tokenizer_config.json")
    bos_token, eos_token = _content(config.get("bos_token")), _content(config.get("eos_token"))
    source = _chat_template_source(folder, config)
    template = None
    if source is not None:
        template = ChatTemplate(
            source,
            tool_source=_tool_template_source(folder, config),
            bos_token=bos_token or "",
            eos_token=eos_token or "",
            special_tokens=_special_tokens(config),
        )
    json_source = JsonSource.of(file, "of_file", str(file.absolute()), MAX_TOKENIZER_BYTES)
    raw = _read_file(file, MAX_TOKENIZER_BYTES)
    try:
        check_source(raw)
        library = guarded(tokenizers.Tokenizer.from_buffer, raw)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from error
    return TokenizerFiles(file, library, bos_token, eos_token, template, json_source=json_source)


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = read_json(file, MAX_CONFIG_BYTES)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(config).__name__}")
    return config


def _content(token: object) -> str | None:
    """Return the text of a special token, which is a string or an object in the configuration."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: content for name, content in named.items() if content is not None}


def _chat_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    source = read_template(folder / "chat_template.jinja")
    if source is None:
        source = config.get("chat_template")
        if isinstance(source, list):
            source = _named_templates(source).get("default")
    if source is not None and not isinstance(source, str):
        raise CheckpointError(
            f"chat_template in {folder / 'tokenizer_config.json'} must be a string or a list of named templates"
        )
    if source is not None and len(source) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"the chat template in {folder} is longer than {MAX_TEMPLATE_BYTES} characters")
    return source


def _tool_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the separate template for conversations with tools, or None."""
    if (folder / "chat_template.jinja").is_file():
        return read_template(folder / "additional_chat_templates" / "tool_use.jinja")
    named = config.get("chat_template")
    source = _named_templates(named).get("tool_use") if isinstance(named, list) else None
    return source if isinstance(source, str) and len(source) <= MAX_TEMPLATE_BYTES else None


def read_template(file: Path) -> str | None:
    """Return the chat template in a file; None if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, is too long, or is not UTF-8 text.
    """
    if not file.is_file():
        return None
    try:
        return _read_file(file, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 text") from error


def _read_file(file: Path, max_bytes: int) -> bytes:
    try:
        return read_file(file, max_bytes)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _named_templates(entries: list[Any]) -> dict[str, Any]:
    named = ((entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, Mapping))
    return {name: template for name, template in named if isinstance(name, str)}
