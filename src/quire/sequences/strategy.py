"""The interface of decoding strategies: they turn the tokens of a step into edits of the request's sequences."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import Protocol, TypeVar

from quire.sequences.edits import Edit

# A `Sequence` names its strategy, and `SamplingParams` may carry one, so the interface names neither.
SequenceT_contra = TypeVar("SequenceT_contra", contravariant=True)


class Strategy(Protocol[SequenceT_contra]):
    """How a request is decoded; stateless, all state is in the request."""

    def num_draws(self, sequence: SequenceT_contra) -> int:
        """Return how many tokens to draw from the logits of the sequence's last token, when these are its prompt's."""
        ...

    def advance(self, sequence: SequenceT_contra, token_ids: Tokens[int]) -> Iterable[Edit]:
        """Return what to do with the tokens that a step gave for a sequence.

        Each edit is made before the next is taken.

        Args:
            sequence: whose step it was, as it is before them.
            token_ids: behind a prompt, the `num_draws` tokens; else a run of tokens that follow each other: the drafts
                that were accepted, the token drawn behind them, and what is certain to follow that.
        """
        ...
