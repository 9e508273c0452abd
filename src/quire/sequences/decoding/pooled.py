"""The strategy of pooled requests, which end with the last token of their prompt."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.sequences.sequence import Sequence
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Edit, Finish


class EndOfPrompt:
    """Ends a sequence once its prompt is computed; no token is appended."""

    def num_draws(self, sequence: Sequence) -> int:  # noqa: ARG002
        """Return 1: the last row of the prompt is read."""
        return 1

    def advance(self, sequence: Sequence, token_ids: Seq[int]) -> Seq[Edit]:  # noqa: ARG002
        """Return the end of the sequence."""
        return (Finish(sequence.sample_idx, FinishReason.STOP),)
