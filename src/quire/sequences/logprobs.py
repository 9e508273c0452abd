"""The log probabilities of one position."""

from __future__ import annotations

from array import array
from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, from the raw distribution (before penalties and temperature).

    Args:
        token_id: the chosen (or given, in a prompt) token.
        logprob: its log probability.
        rank: 1 for the likeliest token.
        top_ids: the likeliest tokens, best first; may be empty. Typecode "i".
        top_logprobs: their log probabilities. Typecode "d".
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: array[int] = array("i")
    top_logprobs: array[float] = array("d")

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens, best first, each with its log probability."""
        return tuple(zip(self.top_ids, self.top_logprobs, strict=True))
