"""Tokens as parts of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class TokenPiece(NamedTuple):
    """A token as a part of a text.

    Args:
        data: bytes that the token adds to a text, except at its beginning; none for an id without a token.
        is_token: False for an id without a token, which adds nothing to a text.
        is_special: True for a special token, which a text may leave out.
        is_fallback_byte: True for a raw byte of a tokenizer with byte fallback, for example `<0x0A>`.
    """

    data: bytes
    is_token: bool
    is_special: bool
    is_fallback_byte: bool


class Pieces(dict[int, TokenPiece]):
    """Pieces by token id; each is derived when it is first looked up."""

    def __init__(self, derive: Callable[[int], TokenPiece]) -> None:
        self._derive = derive

    def __missing__(self, token_id: int) -> TokenPiece:
        piece = self[token_id] = self._derive(token_id)
        return piece


def fallback_byte(token: str) -> int | None:
    """Return the byte of a token of byte fallback, such as `<0x0A>`; None for another token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
