"""How many tokens of prompts are computed beside running streams, so that these do not wait too long for their next."""

from __future__ import annotations

# Tokens of prompts that a step takes at least, however slow it is: prompts must go on.
LEAST_TOKENS = 16
# Before anything was measured.
FIRST_TOKENS = 64
# How far one step moves what is believed.
WEIGHT = 0.25


class Pace:
    """Measures what decoding and prompts cost, and cuts what a step computes of prompts so that it takes a given time.

    A step is believed to take what decoding alone takes, and so much more for each token of a prompt. The second number
    falls as chunks grow; it is measured at the sizes that this pace itself allows, so both settle together.

    Args:
        limit_s: what a step should take at most, in seconds.

    Attributes:
        chunk_tokens: of prompts in a step in which streams decode too.
    """

    def __init__(self, limit_s: float) -> None:
        self.chunk_tokens = FIRST_TOKENS
        self._limit_s = limit_s
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def note_step(self, num_decoding: int, num_chunk_tokens: int, elapsed_s: float) -> None:
        """Take in how long a step took.

        Args:
            num_decoding: sequences of which it computed one token.
            num_chunk_tokens: tokens of all others.
            elapsed_s: how long it took.
        """
        if not num_chunk_tokens:
            self._decode_s = _moved(self._decode_s, elapsed_s)
        elif num_chunk_tokens >= LEAST_TOKENS:
            decode_s = (self._decode_s or 0.0) if num_decoding else 0.0
            self._token_s = _moved(self._token_s, max(elapsed_s - decode_s, 0.0) / num_chunk_tokens)
        if self._token_s is None:
            return
        left_s = self._limit_s - (self._decode_s or 0.0)
        # Twice as many as before at most: larger chunks were not measured yet.
        most = 2 * self.chunk_tokens
        fitting = int(left_s / self._token_s) if self._token_s > 0 else most
        self.chunk_tokens = max(LEAST_TOKENS, min(fitting, most))


def _moved(believed: float | None, measured: float) -> float:
    """Return the new belief; the first measure is believed as it is."""
    return measured if believed is None else believed + WEIGHT * (measured - believed)
