"""Long texts, made into tokens piece by piece: in bounded memory, and given up as soon as there are too many.

The library takes 140 bytes and more for each byte of a text, and gives tokens out when it has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import tokenizers

from quire.text.bounds import LeastTokens, growth, least_tokens, normalized_bytes
from quire.text.cuts import Cuts

# Characters from which on a text is long, and has pieces of about so many.
PIECE_CHARS = 1 << 16
# Bytes of a text in which no place to cut was found, and those that a normalizer may make of them.
MAX_UNCUT_BYTES = 1 << 20
MAX_NORMALIZED_BYTES = 1 << 24


class TooManyTokens(Exception):
    """A text has more tokens than were allowed.

    Args:
        num_tokens: it has at least so many.
        is_exact: it has just so many.
    """

    def __init__(self, num_tokens: int, *, is_exact: bool = False) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.is_exact = is_exact


class CannotCut(Exception):
    """A text has a part that is too long to be made into tokens at once.

    Args:
        limit: the bytes that would have been possible.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class LongTexts:
    """Makes long texts into tokens, for one tokenizer.

    Args:
        library: the tokenizer.
        encode: makes a text into tokens at once, without special tokens round it.

    Attributes:
        piece_chars: a text of more characters is long.
    """

    def __init__(self, library: tokenizers.Tokenizer, encode: Callable[[str], list[int]]) -> None:
        self._library = library
        self._encode = encode
        self._max_uncut = min(MAX_UNCUT_BYTES, MAX_NORMALIZED_BYTES // growth(library))
        # Whatever the characters, of at most four bytes each, a piece is no longer than what cannot be cut.
        self.piece_chars = min(PIECE_CHARS, self._max_uncut // 4)

    def encode(self, text: str, max_tokens: int | None, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: not empty.
            max_tokens: give up as soon as there are certainly more; None goes on.
            before, after: special tokens round every text.

        Raises:
            TooManyTokens: there are more than `max_tokens`.
            CannotCut: a part of the text is too long.
        """
        num_around = len(before) + len(after)
        if max_tokens is not None and self._least is not None:
            least = self._least.of(text) + num_around
            if least > max_tokens:
                raise TooManyTokens(least)
        token_ids = [*before]
        start = 0
        while start < len(text):
            end = self._next_cut(text, start)
            token_ids += self._encode_behind(text[start:end]) if start else self._encode(text[:end])
            start = end
            if max_tokens is not None and len(token_ids) + len(after) > max_tokens:
                raise TooManyTokens(len(token_ids) + len(after), is_exact=start == len(text))
        return [*token_ids, *after]

    def prepare(self) -> None:
        """Read the settings of the tokenizer ahead of the first text."""
        _ = self._cuts, self._least, self._num_lead

    @cached_property
    def _cuts(self) -> Cuts:
        return Cuts(self._library)

    @cached_property
    def _least(self) -> LeastTokens | None:
        return least_tokens(self._library)

    @cached_property
    def _num_lead(self) -> int:
        """The tokens of the letter that pieces are put behind; 0 where the model has none for it."""
        try:
            return len(self._encode(self._cuts.lead))
        except Exception:  # the library raises nothing narrower
            return 0

    def _encode_behind(self, piece: str) -> list[int]:
        """Return the tokens of a piece that does not begin its text."""
        return self._encode(self._cuts.lead + piece)[self._num_lead :]

    def _next_cut(self, text: str, start: int) -> int:
        """Return the end of the piece that begins at a place."""
        wanted, last = start + self.piece_chars, min(len(text), start + self._max_uncut)
        if wanted >= len(text):
            return len(text)
        cut = self._cuts.find(text, wanted, last) if self._num_lead else None
        if cut is None:
            cut = len(text)
        if not self._fits(text[start:cut]):
            raise CannotCut(self._max_uncut)
        return cut

    def _fits(self, piece: str) -> bool:
        """Say whether a piece can be made into tokens at once: whatever is in it, or as it is."""
        num_bytes = len(piece.encode())
        if num_bytes <= self._max_uncut or num_bytes > MAX_UNCUT_BYTES:
            return num_bytes <= self._max_uncut
        # A normalizer may make much of some characters, which few texts have.
        return normalized_bytes(self._library, piece) <= MAX_NORMALIZED_BYTES
