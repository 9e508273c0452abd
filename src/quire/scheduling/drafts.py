"""Slots of drafts: reserved before a step verifies the drafts, and rolled back for the rejected ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate

from quire.memory.manager import KVCacheManager
from quire.scheduling.draft_branches import DraftBranches
from quire.scheduling.plan import ItemResult, ScheduledSequence
from quire.scheduling.queues import Queues
from quire.scheduling.stats import SchedulerStats
from quire.sequences.decoding.drafting import Drafter
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.sequence import Sequence

# Tokens that were proposed, by the sequence that they would follow.
Proposals = dict[Sequence, tuple[int, ...]]


class DraftSlots:
    """Reservation and rollback of the slots of drafts.

    Args:
        memory: manager of the KV cache.
        drafter: drafter that proposes tokens; None disables drafts.
        stats: counters of the scheduler.
        queues: queues of the scheduler.
        new_id: function that returns an unused sequence id, for a branch.
        max_num_seqs: maximum number of running sequences and branches together.

    Attributes:
        drafter: drafter in use; may be replaced between two steps.
        branches: branches of the step that was planned last.
    """

    __slots__ = (
        "_later_blocks",
        "_later_states",
        "_max_num_seqs",
        "_memory",
        "_other_drafts",
        "_queues",
        "_stats",
        "branches",
        "drafter",
    )

    def __init__(
        self,
        memory: KVCacheManager,
        drafter: Drafter | None,
        stats: SchedulerStats,
        queues: Queues,
        new_id: Callable[[], int],
        max_num_seqs: int,
    ) -> None:
        self._memory = memory
        self.drafter = drafter
        self._stats = stats
        self._max_num_seqs = max_num_seqs
        self._queues = queues
        self.branches = DraftBranches(memory, new_id, queues.finished_ids)
        # Drafts for branches, by sequence.
        self._other_drafts: dict[Sequence, list[tuple[int, ...]]] = {}
        # Blocks that the running sequences after each position may need, per group of tokens and of states.
        self._later_blocks: list[int] = []
        self._later_states: list[int] = []

    def propose(self, pending_counts: list[int], spare: int) -> Proposals:
        """Let the drafter propose tokens for the running sequences that decode; return those of each that has any.

        There are branches only as long as no other sequence could run in their place.

        Args:
            pending_counts: numbers of tokens to compute of all running sequences, in order.
            spare: number of prompt tokens that the budget leaves.
        """
        assert self.drafter is not None
        propose, proposals = self.drafter.propose, Proposals()
        queues, running = self._queues, self._queues.running
        places = 0 if queues.waiting or queues.swapped or queues.held else self._max_num_seqs - len(running)
        self._other_drafts.clear()
        for sequence, pending in zip(running, pending_counts, strict=True):
            request, num_tokens = sequence.request, len(sequence.tokens)
            limit = min(spare, sequence.max_tokens - num_tokens - 1)
            if pending != 1 or limit < 1 or num_tokens == sequence.num_prompt:
                continue
            if request.params.strategy is None and request.search is None:
                draft = propose(sequence, limit)
                if draft:
                    proposals[sequence] = tuple(draft)
                    if places > 0 and isinstance(self.drafter, AdaptiveDrafter) and not request.params.is_constrained:
                        others = self._other_drafts[sequence] = self.drafter.propose_branches(sequence, draft, limit)
                        del others[places:]
                        places -= len(others)
        if proposals:
            # In this step, each later sequence may need so many blocks; a forked one copies the state that it shares.
            size, chunk = self._memory.block_size, max(spare, 1)
            self._later_blocks = _sums_after([1 + min(pending, chunk) // size for pending in pending_counts])
            self._later_states = _sums_after([len(sequence.request.sequences) > 1 for sequence in running])
        return proposals

    def reserve(self, sequence: Sequence, position: int, draft: tuple[int, ...], spare: int) -> int:
        """Append slots for a sequence's next token and for drafts after it; return the number of further rows.

        0, without slots, where there is no room for a draft. Drafts never cause a preemption, and never go past the
        next snapshot of a state.

        Args:
            sequence: sequence at a position.
            position: its position among the running sequences; they are those of `propose`, but for preempted ones.
            draft: the tokens that were proposed.
            spare: number of rows that the budget leaves.
        """
        memory, seq_id, others = self._memory, sequence.seq_id, self._other_drafts.get(sequence, [])
        draft = draft[: max(spare, 0)]
        if draft:
            most = memory.step_limit(seq_id, 1 + max(len(draft), *map(len, others), 0)) - 1
            draft, others = draft[:most], [other[:most] for other in others]
        if not draft:
            return 0
        fits = memory.arena.fits
        while others and not (
            len(draft) + _num_rows(others) <= spare and fits(self._blocks_needed((draft, *others), position))
        ):
            others.pop()
        if not others and not fits(self._blocks_needed((draft,), position)):
            return 0
        self.branches.open(sequence, others)
        if not memory.append_slots((seq_id,), 1, lookahead=len(draft)):
            self.branches.close_of(sequence)
            return 0
        sequence.draft = draft
        return len(draft) + _num_rows(others)

    def _blocks_needed(self, drafts: Seq[tuple[int, ...]], position: int) -> list[int]:
        """Return the blocks of each group that must be available before the drafts of a sequence take theirs."""
        # A draft takes a copy of the last block, and the blocks that it fills; in recurrent groups a copy of the state.
        size = self._memory.block_size
        num_blocks = self._later_blocks[position] + sum(2 + len(draft) // size for draft in drafts)
        num_states = self._later_states[position] + len(drafts)
        return [num_states if group.is_recurrent else num_blocks for group in self._memory.groups]

    def choose_branches(
        self, items: Seq[ScheduledSequence], results: Seq[ItemResult], sequences: list[Sequence | None]
    ) -> Seq[ItemResult]:
        """Let sequences whose drafts are wrong go on with the branches that are right; return the results.

        Args:
            items, results, sequences: see `DraftBranches.choose`.
        """
        drafter = self.drafter
        for sequence, num_drafted, num_wrong, branch in self.branches.choose(items, results, sequences):
            self._count_rejected(sequence, num_drafted)
            if isinstance(drafter, AdaptiveDrafter):
                drafter.record_branches(num_wrong, is_right=branch is not None)
            if branch is not None:
                # `commit` records and counts the branch's draft in place of the first one.
                if drafter is not None:
                    drafter.record(sequence, len(sequence.draft), 0)
                self._count_rejected(sequence, len(sequence.draft) - len(branch.draft))
                sequence.draft = branch.draft
        return results

    def _count_rejected(self, sequence: Sequence, num_drafted: int) -> None:
        """Count drafts that are not accepted."""
        self._stats.num_draft_tokens += num_drafted
        sequence.num_drafted += num_drafted

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Commit the accepted drafts and roll back the rest; recurrent states are restored from before the step.

        Args:
            sequence: sequence whose drafts were verified; its new tokens are appended already.
            num_tokens: number of computed tokens to keep.
        """
        memory, num_drafted = self._memory, len(sequence.draft)
        end = sequence.num_computed + 1 + num_drafted
        num_accepted = num_tokens - sequence.num_computed - 1
        seq_id = self.branches.seq_id_of(sequence)
        # A branch was chosen because its first token is right, which says nothing about the rate of later ones.
        num_given = int(seq_id != sequence.seq_id)
        if self.drafter is not None and num_accepted >= num_given and num_drafted > num_given:
            self.drafter.record(sequence, num_drafted - num_given, num_accepted - num_given)
        length = memory.rollback.point(seq_id, num_tokens)
        if length < end:
            memory.truncate(seq_id, length)
        memory.publish(seq_id, length)
        sequence.num_computed = length
        if num_given:
            self.branches.take_over(sequence)
        self._stats.record_drafts(num_drafted, num_accepted)
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        sequence.draft = ()


def _num_rows(branches: Iterable[tuple[int, ...]]) -> int:
    """Return the rows of branches: their drafts, and for each the sequence's last token again."""
    return sum(1 + len(draft) for draft in branches)


def _sums_after(counts: Iterable[int]) -> list[int]:
    """Return the sum of the counts after each position."""
    return list(accumulate(reversed([*counts]), initial=0))[-2::-1]
