"""Drafts: tokens that a sequence may go on with, guessed so that one step can verify several of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from quire.sequences.sequence import Sequence

# Stands for a draft that the data plane is to make itself, with a model.
UNKNOWN = -1


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        """Return the tokens that may come next.

        Args:
            sequence: one that decodes; all of its tokens but the last are computed.
            limit: tokens to return at most, at least 1.
        """
        ...

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn what became of a sequence's drafts: how many were verified, and how many of them were right."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Let go of a sequence that has ended; its output may help others of its namespace."""
        ...

    def reset(self) -> None:
        """Let go of what is known of outputs of sequences that have ended."""
        ...


class ModelDrafter:
    """Leaves drafts to a model in the data plane: says how many there are to be, and nothing else."""

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:  # noqa: ARG002
        """See `Drafter`."""
        return (UNKNOWN,) * limit

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """See `Drafter`: nothing is learnt."""

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`: nothing is known."""

    def reset(self) -> None:
        """See `Drafter`: nothing is known."""
