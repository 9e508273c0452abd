"""The log probabilities of one position."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, from the raw distribution (before penalties and temperature).

    Args:
        token_id: the chosen (or given, in a prompt) token.
        logprob: its log probability.
        rank: 1 for the likeliest token.
        top: (token id, log probability) of the likeliest tokens, best first; may be empty.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
