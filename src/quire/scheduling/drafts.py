"""Slots of drafts: reserved before a step verifies the drafts, and rolled back for the rejected ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from quire.decoding.drafting import Drafter
from quire.memory.manager import KVCacheManager
from quire.scheduling.stats import SchedulerStats
from quire.sequences.sequence import Sequence

# Tokens that were proposed, by the sequence that they would follow.
Proposals = dict[Sequence, tuple[int, ...]]


class DraftSlots:
    """Reservation and rollback of the slots of drafts.

    Args:
        memory: manager of the KV cache.
        drafter: drafter that proposes tokens; None disables drafts.
        stats: counters of the scheduler.

    Attributes:
        drafter: drafter in use; may be replaced between two steps.
    """

    __slots__ = ("_later_blocks", "_later_states", "_memory", "_stats", "drafter")

    def __init__(self, memory: KVCacheManager, drafter: Drafter | None, stats: SchedulerStats) -> None:
        self._memory = memory
        self.drafter = drafter
        self._stats = stats
        # Blocks that the running sequences after each position may need, per group of tokens and of states.
        self._later_blocks: list[int] = []
        self._later_states: list[int] = []

    def propose(self, running: list[Sequence], pending_counts: list[int], spare: int) -> Proposals:
        """Let the drafter propose tokens for the sequences that decode; return those of each that has any.

        Args:
            running: all running sequences, in order.
            pending_counts: their numbers of tokens to compute.
            spare: number of prompt tokens that the budget leaves.
        """
        assert self.drafter is not None
        propose, proposals = self.drafter.propose, Proposals()
        for sequence, pending in zip(running, pending_counts, strict=True):
            request, num_tokens = sequence.request, len(sequence.tokens)
            limit = min(spare, sequence.max_tokens - num_tokens - 1)
            if pending != 1 or limit < 1 or num_tokens == sequence.num_prompt:
                continue
            if request.params.strategy is None and request.search is None:
                draft = propose(sequence, limit)
                if draft:
                    proposals[sequence] = tuple(draft)
        if proposals:
            # In this step, each later sequence may need so many blocks; a forked one copies the state that it shares.
            size, chunk = self._memory.block_size, max(spare, 1)
            self._later_blocks = _sums_after([1 + min(pending, chunk) // size for pending in pending_counts])
            self._later_states = _sums_after([len(sequence.request.sequences) > 1 for sequence in running])
        return proposals

    def reserve(self, sequence: Sequence, position: int, draft: tuple[int, ...]) -> bool:
        """Append slots for a sequence's next token and for tokens after it; False, without slots, where it has none.

        Drafts never cause a preemption, and never go past the next snapshot of a state.

        Args:
            sequence: sequence at a position.
            position: its position among the running sequences; they are those of `propose`, but for preempted ones.
            draft: the tokens that were proposed and fit into the budget.
        """
        memory = self._memory
        if draft:
            draft = draft[: memory.step_limit(sequence.seq_id, 1 + len(draft)) - 1]
        if not draft or not memory.arena.fits(self._blocks_needed(len(draft), position)):
            return False
        if not memory.append_slots((sequence.seq_id,), 1, lookahead=len(draft)):
            return False
        sequence.draft = draft
        return True

    def _blocks_needed(self, num_drafted: int, position: int) -> list[int]:
        """Return the blocks of each group that must be available before drafts at a position take theirs."""
        # A copy of the last block, and the blocks that the drafts fill; for recurrent groups one copy of the state.
        num_blocks = self._later_blocks[position] + 2 + num_drafted // self._memory.block_size
        num_states = self._later_states[position] + 1
        return [num_states if group.is_recurrent else num_blocks for group in self._memory.groups]

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Commit the accepted drafts and roll back the rest; recurrent states are restored from before the step.

        Args:
            sequence: sequence whose drafts were verified; its new tokens are appended already.
            num_tokens: number of computed tokens to keep.
        """
        memory, seq_id, num_drafted = self._memory, sequence.seq_id, len(sequence.draft)
        end = sequence.num_computed + 1 + num_drafted
        num_accepted = num_tokens - sequence.num_computed - 1
        if self.drafter is not None:
            self.drafter.record(sequence, num_drafted, num_accepted)
        self._stats.record_drafts(num_drafted, num_accepted)
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        sequence.draft = ()
        length = memory.rollback.point(seq_id, num_tokens)
        if length < end:
            memory.truncate(seq_id, length)
        memory.publish(seq_id, length)
        sequence.num_computed = length


def _sums_after(counts: Iterable[int]) -> list[int]:
    """Return the sum of the counts after each position."""
    return list(accumulate(reversed([*counts]), initial=0))[-2::-1]
