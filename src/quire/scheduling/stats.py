"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.memory.status import NO_TOKENS, TokenAccount


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start.

    Args:
        prefix_queries: prompt tokens looked up in the prefix index at first admission.
        prefix_hits: of those, tokens that were found.
        resumed_queries: tokens looked up when a preempted sequence came back; kept apart, because finding one's
            own blocks again says nothing about sharing.
        resumed_hits: of those, tokens that were found.
        first_time: all prompt tokens at first admission, by source, and the computed ones by reason.
        resumed: the same of all tokens of sequences that came back.
        num_preemptions: times that a sequence lost its memory.
        num_swaps: of those, times that it was swapped out and lost nothing.
        wasted_tokens: computed tokens that the others lost.
        num_drafts: times that a sequence's drafts were verified.
        num_draft_tokens: drafts that were.
        num_accepted_tokens: of those, drafts that were right.
        accepted_by_position: the same by the draft's place behind the last token.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    first_time: TokenAccount = NO_TOKENS
    resumed: TokenAccount = NO_TOKENS
    num_preemptions: int = 0
    num_swaps: int = 0
    wasted_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    def note_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of a sequence in a step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        by_position = self.accepted_by_position
        by_position += [0] * (num_accepted - len(by_position))
        for position in range(num_accepted):
            by_position[position] += 1
