"""What a decoding strategy is: it turns what a step gave into edits of its request's sequences."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire.sequences.edits import Edit
    from quire.sequences.sequence import Sequence


class Strategy(Protocol):
    """How a request is decoded; stateless, all state is in the request."""

    def num_draws(self, sequence: Sequence) -> int:
        """Return how many tokens to draw from the logits of the sequence's last token, when these are its prompt's."""
        ...

    def advance(self, sequence: Sequence, token_ids: Tokens[int]) -> Iterable[Edit]:
        """Return what to do with the tokens that a step gave for a sequence.

        Each edit is made before the next is taken.

        Args:
            sequence: whose step it was, as it is before them.
            token_ids: behind a prompt, the `num_draws` tokens; else a run of tokens that follow each other: the drafts
                that were accepted, the token drawn behind them, and what is certain to follow that.
        """
        ...
