"""Tokenization of long texts in pieces: in bounded memory, and with an early end if there are too many tokens.

The library takes at least 140 bytes for each byte of a text, and returns no tokens before the end of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import tokenizers

from quire.errors import InvalidParameter, RequestError
from quire.text.vocabulary.bounds import LeastTokens, fits_normalized, growth, least_tokens
from quire.text.vocabulary.components import model_tokens
from quire.text.vocabulary.cuts import Cuts

# Approximate number of characters of a piece; a text with more is long.
PIECE_CHARS = 1 << 16
# Maximum bytes of a piece, before normalization and pre-tokenization and after them: spaces may become marks of three
# bytes. The library takes about 140 bytes of memory for each byte after them, so at most 440 MB.
MAX_UNCUT_BYTES = 1 << 20
MAX_NORMALIZED_BYTES = 3 * MAX_UNCUT_BYTES


class TooManyTokens(Exception):
    """A text has more tokens than allowed.

    Args:
        num_tokens: lower bound on the number of tokens.
        is_exact: True if `num_tokens` is the exact number.
    """

    def __init__(self, num_tokens: int, *, is_exact: bool = False) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.is_exact = is_exact


class CannotCut(Exception):
    """A text has a part that is too long to be tokenized at once."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


@contextmanager
def prompt_errors(text: str | list[str]) -> Iterator[None]:
    """Raise errors of tokenization as errors of the prompt."""
    try:
        yield
    except (TooManyTokens, RequestError):
        raise
    except (TypeError, UnicodeEncodeError) as error:  # lone surrogates
        raise InvalidParameter("prompt", text, "Unicode text without lone surrogates") from error
    except CannotCut as error:
        allowed = f"text without more than {error.limit} bytes in a row that this model's tokenizer cannot divide"
        raise InvalidParameter("prompt", f"{len(text)} characters", allowed) from error
    except Exception as error:  # the library raises nothing narrower
        raise InvalidParameter("prompt", text, f"text that the tokenizer can express ({error})") from error


# Returns the tokens of a lead (the third argument) and of the text between two positions.
EncodePart = Callable[[int, int, str], list[int]]


class LongTexts:
    """Tokenizes the long texts of one tokenizer."""

    def __init__(self, library: tokenizers.Tokenizer, encode: Callable[[str], list[int]]) -> None:
        self._library = library
        self._encode = encode
        self._max_uncut = min(MAX_UNCUT_BYTES, MAX_NORMALIZED_BYTES // growth(library))
        # A piece fits the limit in bytes with any characters, which have at most four bytes each.
        self.piece_chars = min(PIECE_CHARS, self._max_uncut // 4)

    def encode(
        self,
        text: str,
        max_tokens: int | None,
        before: Sequence[int],
        after: Sequence[int],
        encode_part: EncodePart | None = None,
    ) -> list[int]:
        """Return the tokens of a text."""
        num_around = len(before) + len(after)
        is_long = len(text) > self.piece_chars
        if max_tokens is not None and is_long and self._least is not None:
            least = self._least.of(text) + num_around
            if least > max_tokens:
                raise TooManyTokens(least)
        encode = encode_part or (lambda start, end, lead: self._encode(lead + text[start:end]))
        token_ids = [*before]
        start = 0
        while start < len(text):
            end = self._next_cut(text, start)
            # A piece that does not begin its text comes after the lead letter, whose tokens are dropped.
            token_ids += encode(start, end, self._cuts.lead)[self._num_lead :] if start else encode(0, end, "")
            start = end
            if max_tokens is not None and len(token_ids) + len(after) > max_tokens:
                raise TooManyTokens(len(token_ids) + len(after), is_exact=start == len(text))
        return [*token_ids, *after]

    def prepare(self) -> None:
        """Analyse the tokenizer's settings ahead of the first text."""
        _ = self._rules, self._num_lead

    @cached_property
    def _rules(self) -> tuple[Cuts, LeastTokens | None]:
        tokens = model_tokens(self._library)
        return Cuts(self._library, tokens), least_tokens(self._library, tokens)

    @property
    def _cuts(self) -> Cuts:
        return self._rules[0]

    @property
    def _least(self) -> LeastTokens | None:
        return self._rules[1]

    @cached_property
    def _num_lead(self) -> int:
        """The number of tokens of the lead letter; 0 if the model has no token for it."""
        try:
            return len(self._encode(self._cuts.lead))
        except Exception:  # the library raises nothing narrower
            return 0

    def _next_cut(self, text: str, start: int) -> int:
        """Return the end of the piece that begins at `start`."""
        wanted, last = start + self.piece_chars, min(len(text), start + self._max_uncut)
        if wanted >= len(text):
            return len(text)
        cut = self._cuts.find(text, wanted, last) if self._num_lead else None
        if cut is None:
            cut = len(text)
        self._check_size(text[start:cut])
        return cut

    def _check_size(self, piece: str) -> None:
        """Refuse a piece that cannot be tokenized at once, by its length or by its normalized length."""
        num_bytes = len(piece.encode())
        if num_bytes > MAX_UNCUT_BYTES:
            raise CannotCut(MAX_UNCUT_BYTES)
        # The normalizer may lengthen some characters much, but few texts have these characters.
        if num_bytes > self._max_uncut and not fits_normalized(self._library, piece, MAX_NORMALIZED_BYTES):
            raise CannotCut(self._max_uncut)
