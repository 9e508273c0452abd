"""Drafters: they propose the next tokens of a sequence, so that one step can verify several of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from quire.sequences.sequence import Sequence

# Placeholder of a draft that the data plane computes with a draft model.
UNKNOWN = -1


class Drafter(Protocol):
    """Proposes draft tokens."""

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        """Return the tokens that may come next.

        Args:
            sequence: decoding sequence; all of its tokens but the last are computed.
            limit: maximum number of tokens to return, at least 1.
        """

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Record the result of a verification: the numbers of verified and of accepted drafts."""

    def forget(self, sequence: Sequence) -> None:
        """Release the state of a sequence that has ended; its output may serve others of its namespace."""

    def reset(self) -> None:
        """Discard the outputs of sequences that have ended."""


class ModelDrafter:
    """Drafter of a draft model, which runs in the data plane: only the number of drafts is decided here."""

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:  # noqa: ARG002
        """See `Drafter`."""
        return (UNKNOWN,) * limit

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: there is no state."""

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: there is no state."""

    def reset(self) -> None:
        """Do nothing: there is no state."""
