"""Log probabilities of one position."""

from __future__ import annotations

from array import array
from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, from the raw distribution (before penalties and temperature).

    Args:
        token_id: sampled token, or token of the prompt.
        logprob: log probability of `token_id`.
        rank: rank of `token_id`; 1 is the likeliest token.
        top_ids: likeliest tokens, best first; may be empty. Typecode "i".
        top_logprobs: log probabilities of `top_ids`. Typecode "d".
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
