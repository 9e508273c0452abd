"""What a decoding strategy wants done to its request's sequences; applied in order by the scheduler."""

from __future__ import annotations

from typing import NamedTuple

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
