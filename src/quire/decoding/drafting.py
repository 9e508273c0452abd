"""Drafts: tokens that a sequence may go on with, guessed so that one step can verify several of them."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Protocol

from quire.sequences.sequence import Sequence


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def propose(self, sequence: Sequence, limit: int) -> Tokens[int]:
        """Return the tokens that may come next.

        Args:
            sequence: one that decodes; all of its tokens but the last are computed.
            limit: tokens to return at most, at least 1.
        """
        ...

    def note(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn what became of a sequence's drafts: how many were verified, and how many of them were right."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Let go of a sequence that has ended; its output may help others of its namespace."""
        ...

    def reset(self) -> None:
        """Let go of what is known of outputs of sequences that have ended."""
        ...
