"""Decoding strategies: the protocol, and the edits of a request's sequences that a strategy returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from quire.sequences.status import FinishReason


class Fork(NamedTuple):
    """Open sample `sample_idx` as a copy of sample `parent_idx`."""

    sample_idx: int
    parent_idx: int


class Append(NamedTuple):
    """Add draw number `draw_idx` of the step to sample `sample_idx`."""

    sample_idx: int
    draw_idx: int


class Truncate(NamedTuple):
    """Of what a step computed for sample `sample_idx`, drafts included, keep what is of its first `num_tokens` tokens.

    It follows the appends of a run whose drafts were verified, and comes once for each such run.
    """

    sample_idx: int
    num_tokens: int


class Drop(NamedTuple):
    """Give beam `sample_idx` up: it ends and leaves nothing, and another may take its place."""

    sample_idx: int


class Finish(NamedTuple):
    """End sample `sample_idx`."""

    sample_idx: int
    reason: FinishReason
    stop_reason: str | int | None = None


class Fail(NamedTuple):
    """End the request with an error; no edit comes after it."""

    error: str


Edit = Fork | Append | Truncate | Finish | Fail
# Of a search, all of whose beams are advanced together.
BeamEdit = Fork | Append | Drop | Finish


# A `Sequence` names its strategy, and `SamplingParams` may carry one, so the interface names neither.
SequenceT_contra = TypeVar("SequenceT_contra", contravariant=True)


class Strategy(Protocol[SequenceT_contra]):
    """How a request is decoded; stateless, all state is in the request."""

    def num_draws(self, sequence: SequenceT_contra) -> int:
        """Return how many tokens to draw from the logits of the sequence's last token, when these are its prompt's."""
        ...

    def advance(self, sequence: SequenceT_contra, token_ids: Sequence[int]) -> Iterable[Edit]:
        """Return what to do with the tokens that a step gave for a sequence.

        Each edit is made before the next is taken.

        Args:
            sequence: whose step it was, as it is before them.
            token_ids: behind a prompt, the `num_draws` tokens; else a run of tokens that follow each other: the drafts
                that were accepted, the token drawn behind them, and what is certain to follow that.
        """
        ...
