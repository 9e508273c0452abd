"""The vocabulary of a GGUF file: fields that a tokenizer needs are checked, other faults are only logged.

Published files have padding ids outside the vocabulary, empty tokens and tokens of the same text. Such faults affect
neither encoding nor decoding of texts, so they are logged, and the file is served.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import tokenizers
from tokenizers import AddedToken

from quire.errors import CheckpointError, shown

logger = logging.getLogger(__name__)

PREFIX: Final = "tokenizer.ggml."
# Types of tokens; a token with any other number is a normal token.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# The control tokens of Phi-3 that do not absorb the spaces that follow.
UNSTRIPPED: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})


class GGUFVocabulary:
    """The tokens of a file, checked."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path, self._fields = path, fields
        self.tokens = self.texts("tokens")
        if not self.tokens:
            raise self.wrong(f"{PREFIX}tokens", [], "at least one token")
        self.types = self._read_types()
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        self.doubles: dict[int, int] = {}
        if len(self.ids) < len(self.tokens) or "" in self.ids:
            self._leave_out_doubles()

    def _leave_out_doubles(self) -> None:
        """Leave empty tokens, and all but the first token of each text, out of `ids`."""
        self.ids = {}
        num_empty = 0
        for token_id, token in enumerate(self.tokens):
            first = self.ids.setdefault(token, token_id) if token else None
            if first is None:
                num_empty += 1
            elif first != token_id:
                self.doubles[token_id] = first
        if num_empty:
            self.warn(f"{num_empty:,} of {PREFIX}tokens are empty: they stand for no text")
        for token_id, first in list(self.doubles.items())[:3]:
            text = shown(self.tokens[token_id])
            self.warn(f"{PREFIX}tokens has {text} twice, as {first} and as {token_id}: the text is encoded as {first}")

    def _read_types(self) -> list[int]:
        count, name = len(self.tokens), f"{PREFIX}token_type"
        types = self._fields.get(name, [NORMAL] * count)
        # If there are more types than tokens, the first ones are used, as in llama.cpp.
        if not isinstance(types, list) or len(types) < count or {*map(type, types)} - {int}:
            raise self.wrong(name, types, f"{count} integers")
        return types[:count]

    def texts(self, name: str) -> list[str]:
        """Read a list of strings."""
        value = self._fields.get(f"{PREFIX}{name}")
        if not isinstance(value, list) or {*map(type, value)} - {str}:
            raise self.wrong(f"{PREFIX}{name}", value, "a list of strings")
        return value

    def numbers(self, name: str) -> list[float]:
        """Read a number for each token."""
        value = self._fields.get(f"{PREFIX}{name}")
        count = len(self.tokens)
        is_list = isinstance(value, list) and len(value) >= count and not {*map(type, value)} - {int, float}
        if not is_list or not all(map(math.isfinite, numbers := cast("list[float]", value))):
            raise self.wrong(f"{PREFIX}{name}", value, f"{count} finite numbers")
        return numbers[:count]

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false."""
        value = self._fields.get(f"{PREFIX}{name}", default)
        if not isinstance(value, bool):
            raise self.wrong(f"{PREFIX}{name}", value, "true or false")
        return value

    def has(self, name: str) -> bool:
        """Return whether a field exists."""
        return f"{PREFIX}{name}" in self._fields

    def token(self, name: str, default: str | None = None) -> str | None:
        """Return the token whose id is in a field; else the default, if it is a control or unknown token."""
        key, count = f"{PREFIX}{name}_token_id", len(self.tokens)
        token_id = self._fields.get(key)
        if token_id is not None:
            if type(token_id) is not int:
                raise self.wrong(key, token_id, f"a token id from 0 to {count - 1}")
            if 0 <= token_id < count and self.tokens[token_id]:
                return self.tokens[token_id]
            self.warn(f"{key} is {token_id:,}, which is none of the {count:,} tokens: it is ignored")
        default_id = None if default is None else self.ids.get(default)
        return None if default_id is None or self.types[default_id] not in (CONTROL, UNKNOWN) else default

    def add_special_tokens(self, library: tokenizers.Tokenizer, *, strips: bool) -> None:
        """Have texts of control and user-defined tokens matched before the pre-tokenizer runs."""
        special = [
            AddedToken(token, special=True, normalized=False, rstrip=strips and token not in UNSTRIPPED)
            for token in self.of_type(CONTROL)
        ]
        plain = [AddedToken(token, special=False, normalized=False) for token in self.of_type(USER_DEFINED)]
        library.add_special_tokens(special)
        library.add_tokens(plain)

    def of_type(self, kind: int) -> list[str]:
        """Return the texts of all tokens of a type, without duplicates and empty texts."""
        return [token for token, token_id in self.ids.items() if self.types[token_id] == kind]

    def wrong(self, key: str, value: object, allowed: str) -> CheckpointError:
        """Return the error for a field with a value that is not allowed."""
        return CheckpointError(f"{self._path}: {key} must be {allowed}, got {shown(value)}", field=key)

    def warn(self, message: str) -> None:
        """Log a fault of the file that does not affect the tokenizer."""
        logger.warning("%s: %s", self._path, message)
