"""The tokens of simulated requests: spans of streams, which become token ids only when a replica serves them.

A *stream* is an endless numbered text: a system prompt, a user's message, an answer. Two streams differ in their first
token, so a prompt hits another prompt's blocks exactly as far as both begin with the same spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# First token of stream 0; the other tokens of all streams are below, and token ids have 32 bits.
FIRST_ID = 1 << 24
MAX_STREAMS = (1 << 32) - FIRST_ID


class TokenSpan(NamedTuple):
    """The tokens `[start, end)` of a stream."""

    stream: int
    start: int
    end: int


class TokenTable:
    """Returns the token ids of spans; all lists share the same integer objects, so a token takes eight bytes."""

    __slots__ = ("_ids",)

    def __init__(self, num_ids: int = 4096) -> None:
        self._ids = list(range(num_ids))

    def at_least(self, count: int) -> list[int]:
        """Return at least `count` ids of a stream, except its first one, which differs; do not change the list."""
        ids = self._ids
        if count > len(ids):
            ids += range(len(ids), max(count, 2 * len(ids)))
        return ids

    def token_ids(self, spans: Iterable[TokenSpan]) -> list[int]:
        """Return the token ids of consecutive spans."""
        token_ids: list[int] = []
        for stream, start, end in spans:
            position = len(token_ids)
            token_ids += self.at_least(end)[start:end]
            if start == 0 and end > 0:
                token_ids[position] = FIRST_ID + stream
        return token_ids

    def token_at(self, stream: int, position: int) -> int:
        """Return one token id of a stream."""
        return FIRST_ID + stream if position == 0 else position


def num_tokens(spans: Iterable[TokenSpan]) -> int:
    """Return the number of tokens of some spans."""
    return sum(end - start for _, start, end in spans)
