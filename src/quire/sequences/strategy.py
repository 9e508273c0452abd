"""Decoding strategies: the protocol, and the edits of a request's sequences that a strategy returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from quire.sequences.status import FinishReason


class Fork(NamedTuple):
    """Create sample `sample_idx` as a copy of sample `parent_idx`."""

    sample_idx: int
    parent_idx: int


class Append(NamedTuple):
    """Append the step's token with index `draw_idx` to sample `sample_idx`."""

    sample_idx: int
    draw_idx: int


class Truncate(NamedTuple):
    """Keep the computed KV of the first `num_tokens` tokens of sample `sample_idx`; roll back rejected drafts.

    It follows the appends of a step that verified drafts, once for each such step.
    """

    sample_idx: int
    num_tokens: int


class Drop(NamedTuple):
    """End beam `sample_idx` without an output; another beam may replace it."""

    sample_idx: int


class Finish(NamedTuple):
    """End sample `sample_idx`."""

    sample_idx: int
    reason: FinishReason
    stop_reason: str | int | None = None


class Fail(NamedTuple):
    """End the request with an error; it is the last edit."""

    error: str


Edit = Fork | Append | Truncate | Finish | Fail
# Edits of a beam search, whose beams advance together.
BeamEdit = Fork | Append | Drop | Finish


# A type variable avoids an import cycle: `Sequence` and `SamplingParams` refer to their strategy.
SequenceT_contra = TypeVar("SequenceT_contra", contravariant=True)


class Strategy(Protocol[SequenceT_contra]):
    """Decoding strategy of a request; stateless, since all state is in the request."""

    def num_draws(self, sequence: SequenceT_contra) -> int:
        """Return the number of tokens to draw from the last logits of the prompt."""

    def advance(self, sequence: SequenceT_contra, token_ids: Sequence[int]) -> Iterable[Edit]:
        """Return the edits for the tokens that a step gave for a sequence.

        Each edit is applied before the next is taken from the iterable.

        Args:
            sequence: sequence before the tokens are appended.
            token_ids: the `num_draws` tokens of a prompt; otherwise consecutive tokens: the accepted drafts, the token
                drawn after them, and tokens that the grammar forces after that one.
        """
