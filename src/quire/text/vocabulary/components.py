"""Settings of a tokenizer's components (`tokenizers` library), and calls that turn its panics into exceptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LibraryFailed(Exception):
    """The library panicked."""


def guarded(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of the library; raise a panic as `LibraryFailed`."""
    try:
        return call(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LibraryFailed(f"the tokenizer library gave up: {error}") from error


def model_tokens(library: Any) -> list[str]:
    """Return the texts of the model's tokens, in any order; other threads run meanwhile.

    `get_vocab` holds the interpreter lock for all of them: 0.2 s for 262,144 tokens.
    """
    model, size = library.model, library.get_vocab_size(with_added_tokens=False)
    tokens = [token for token_id in range(2 * size) if (token := model.id_to_token(token_id)) is not None]
    return tokens if len(tokens) == size else list(library.get_vocab(with_added_tokens=False))


def added_tokens(library: Any) -> Iterator[tuple[str, str]]:
    """Yield the text of each added token of a tokenizer, and its form that is matched after normalization."""
    normalizer = library.normalizer
    for token in library.get_added_tokens_decoder().values():
        is_normalized = token.normalized and normalizer is not None
        yield token.content, normalizer.normalize_str(token.content) if is_normalized else token.content


def steps(component: Any, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of each step of a component, in order."""
    left = [] if component is None else [json.loads(component.__getstate__())]
    while left:
        step = left.pop(0)
        if step["type"] == "Sequence":
            left = step[inner] + left
        else:
            yield step


def normalizers(library: Any) -> list[dict[str, Any]]:
    """Return the settings of a tokenizer's normalizers."""
    return list(steps(library.normalizer, "normalizers"))


def pre_tokenizers(library: Any) -> list[dict[str, Any]]:
    """Return the settings of a tokenizer's pre-tokenizers."""
    return list(steps(library.pre_tokenizer, "pretokenizers"))


def decoders(library: Any) -> list[dict[str, Any]]:
    """Return the settings of a tokenizer's decoders."""
    return list(steps(library.decoder, "decoders"))


def byte_alphabet() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte.

    Printable Latin-1 bytes are represented by themselves; the others, in order, by the characters from U+0100 on.

    Source: the GPT-2 tokenizer.
    """
    alphabet: dict[str, int] = {}
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        if printable:
            alphabet[chr(byte)] = byte
    for byte in sorted(set(range(256)) - set(alphabet.values())):
        alphabet[chr(256 + len(alphabet) - 188)] = byte
    return alphabet
