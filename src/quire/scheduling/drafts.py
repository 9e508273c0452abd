"""Slots of drafts: reserved before a step verifies the drafts, and rolled back for the rejected ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from quire.memory.manager import KVCacheManager
from quire.scheduling.queues import Queues
from quire.scheduling.stats import SchedulerStats
from quire.sequences.decoding.drafting import Drafter
from quire.sequences.sequence import Sequence

# Tokens that were proposed, by the sequence that they would follow.
Proposals = dict[Sequence, tuple[int, ...]]


class DraftSlots:
    """Reservation and rollback of the slots of drafts."""

    __slots__ = ("_later_blocks", "_later_states", "_memory", "_queues", "_stats", "drafter")

    def __init__(self, memory: KVCacheManager, drafter: Drafter | None, stats: SchedulerStats, queues: Queues) -> None:
        self._memory = memory
        self.drafter = drafter
        self._stats = stats
        self._queues = queues
        # Blocks that the running sequences after each position may need, per group of tokens and of states.
        self._later_blocks: list[int] = []
        self._later_states: list[int] = []

    def propose(self, pending_counts: list[int], spare: int) -> Proposals:
        """Let the drafter propose tokens for the running sequences that decode; return the proposals."""
        assert self.drafter is not None
        propose, proposals, running = self.drafter.propose, Proposals(), self._queues.running
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

    def reserve(self, sequence: Sequence, position: int, draft: tuple[int, ...], spare: int) -> int:
        """Append slots for a sequence's next token and for drafts after it; return the number of drafts.

        It is 0, without slots, if there is no room for a draft. Drafts never cause a preemption, and never go past the
        next snapshot of a state.
        """
        memory, seq_id = self._memory, sequence.seq_id
        draft = draft[: max(spare, 0)]
        if draft:
            draft = draft[: memory.step_limit(seq_id, 1 + len(draft)) - 1]
        if not draft or not memory.arena.fits(self._blocks_needed(draft, position)):
            return 0
        if not memory.append_slots((seq_id,), 1, lookahead=len(draft)):
            return 0
        sequence.draft = draft
        return len(draft)

    def _blocks_needed(self, draft: tuple[int, ...], position: int) -> list[int]:
        """Return the blocks of each group that must be available before a draft takes its own."""
        # A draft takes a copy of the last block, and the blocks that it fills; in recurrent groups a copy of the state.
        num_blocks = self._later_blocks[position] + 2 + len(draft) // self._memory.block_size
        num_states = self._later_states[position] + 1
        return [num_states if group.is_recurrent else num_blocks for group in self._memory.groups]

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Commit the accepted drafts and roll back the rest; recurrent states are restored from before the step."""
        memory, seq_id, num_drafted = self._memory, sequence.seq_id, len(sequence.draft)
        end = sequence.num_computed + 1 + num_drafted
        num_accepted = num_tokens - sequence.num_computed - 1
        if self.drafter is not None and num_accepted >= 0 and num_drafted > 0:
            self.drafter.record(sequence, num_drafted, num_accepted)
        length = memory.rollback.point(seq_id, num_tokens)
        if length < end:
            memory.truncate(seq_id, length)
        memory.publish(seq_id, length)
        sequence.num_computed = length
        self._stats.record_drafts(num_drafted, num_accepted)
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        sequence.draft = ()


def _sums_after(counts: Iterable[int]) -> list[int]:
    """Return the sum of the counts after each position."""
    return list(accumulate(reversed([*counts]), initial=0))[-2::-1]
