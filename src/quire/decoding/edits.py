"""What a decoding strategy wants done to a request's sequences; applied in order by the scheduler."""

from __future__ import annotations

from typing import NamedTuple

from quire.sequences.sequence import FinishReason


class Fork(NamedTuple):
    """Open sample `sample_idx` as a copy of the sequence that was advanced."""

    sample_idx: int


class Append(NamedTuple):
    """Add draw number `draw_idx` of the step to sample `sample_idx`."""

    sample_idx: int
    draw_idx: int


class Finish(NamedTuple):
    """End sample `sample_idx`."""

    sample_idx: int
    reason: FinishReason
    stop_reason: str | int | None = None


Edit = Fork | Append | Finish
