"""Incremental detokenization of one sequence, at a constant cost per token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from copy import copy
from typing import Protocol

from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.vocabulary.token_pieces import TokenPiece

REPLACEMENT = "\ufffd"
# An incomplete character has at most three bytes.
MAX_PENDING_BYTES = 3


class IncrementalDetokenizer:
    """Returns the text of each new token once its characters are complete.

    ```
     bytes    |<-- prompt's complete characters -->|<-- pushed -->|<-- held back, 0 to 3 bytes -->|
    ```

    The bytes of a token depend on that token alone (and on whether it begins the text), so nothing is decoded twice.
    The joined results of `push` and `flush` equal the text of `decode(prompt + output)` after the prompt's complete
    characters, with one exception: with byte fallback, `decode` replaces a whole run of byte tokens if any part of it
    is not UTF-8; here the complete characters before that part were already returned, and stay.

    Args:
        tokenizer: the model's tokenizer.
        prompt_ids: tokens before the first pushed one; their last character may be completed by the output.
        skip_special_tokens: True to leave special tokens out of the text.
        kept_special_ids: special tokens that stay in the text in any case.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        kept_special_ids: Sequence[int] = (),
    ) -> None:
        self._pieces, self._head_bytes = tokenizer.pieces, tokenizer.head_bytes
        self._skip = skip_special_tokens
        self._kept = frozenset(kept_special_ids)
        self._characters: _Characters = _RunCharacters() if tokenizer.has_byte_fallback else _LossyCharacters()
        self._begins_text = True
        self._replay(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the characters that they complete."""
        return "".join([self._add(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return the incomplete bytes as replacement characters, at the end of the sequence."""
        return self._characters.end()

    def fork(self) -> IncrementalDetokenizer:
        """Return an independent copy."""
        forked = copy(self)
        forked._characters = self._characters.fork()
        return forked

    def _add(self, token_id: int) -> str:
        piece = self._visible_piece(token_id)
        if piece is None:
            return ""
        data = self._head_bytes(token_id) if self._begins_text else piece.data
        self._begins_text = False
        return self._characters.add(data, is_fallback_byte=piece.is_fallback_byte)

    def _visible_piece(self, token_id: int) -> TokenPiece | None:
        piece = self._pieces[token_id]
        is_skipped = piece.is_special and self._skip and token_id not in self._kept
        return piece if piece.is_token and not is_skipped else None

    def _replay(self, prompt_ids: Sequence[int]) -> None:
        """Restore the state after the prompt from the prompt's last few tokens."""
        tail: list[int] = []
        num_bytes = 0
        for token_id in reversed(prompt_ids):
            piece = self._visible_piece(token_id)
            if piece is None:
                continue
            self._begins_text = False
            tail.append(token_id)
            num_bytes += len(piece.data)
            # With byte fallback, an invalid byte at the start of a run affects its end, so the whole run is replayed.
            if not piece.is_fallback_byte and num_bytes > MAX_PENDING_BYTES:
                break
        for token_id in reversed(tail):
            self._add(token_id)


class _Characters(Protocol):
    """Collects bytes into complete characters."""

    def add(self, piece: bytes, *, is_fallback_byte: bool) -> str:
        """Take a token's bytes and return the characters that they complete."""

    def end(self) -> str:
        """Return the incomplete bytes as replacement characters."""

    def fork(self) -> _Characters:
        """Return an independent copy."""


class _LossyCharacters:
    """Characters of one byte stream; each maximal invalid part becomes one replacement character, as Python decodes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes, *, is_fallback_byte: bool) -> str:  # noqa: ARG002 - all bytes are alike here
        return self._decoder.decode(piece)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)

    def fork(self) -> _LossyCharacters:
        forked = _LossyCharacters()
        forked._decoder.setstate(self._decoder.getstate())
        return forked


class _RunCharacters:
    """Characters of runs of byte tokens; after an invalid byte, each byte of the run is a replacement character."""

    def __init__(self) -> None:
        self._pending = b""
        self._is_broken = False

    def add(self, piece: bytes, *, is_fallback_byte: bool) -> str:
        if not is_fallback_byte:
            return self.end() + piece.decode()
        if self._is_broken:
            return REPLACEMENT * len(piece)
        run, self._pending = self._pending + piece, b""
        try:
            return run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                self._pending = run
                return ""
            self._is_broken = True
            return REPLACEMENT * len(run)

    def end(self) -> str:
        pending, self._pending, self._is_broken = self._pending, b"", False
        return REPLACEMENT * len(pending)

    def fork(self) -> _RunCharacters:
        return copy(self)
