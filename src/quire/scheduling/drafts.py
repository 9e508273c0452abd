"""Drafts in a step: which sequences verify some, in whose slots, and what is kept of them."""

from __future__ import annotations

from typing import NamedTuple

from quire.decoding.drafting import Drafter
from quire.memory.manager import KVCacheManager
from quire.scheduling.stats import SchedulerStats
from quire.sequences.sequence import Sequence


class Reserved(NamedTuple):
    """Memory that sequences which are not served yet may ask for in the step.

    Args:
        num_blocks: blocks of each group of tokens.
        num_states: blocks of each group of states: a forked sequence copies the state that it shares.
    """

    num_blocks: int
    num_states: int


class Drafts:
    """Gets slots for drafts, and takes back those of the wrong ones.

    Args:
        memory: the manager.
        drafter: guesses how sequences go on; None verifies no drafts.
        stats: of the scheduler; counts them.

    Attributes:
        drafter: may be put in place of another between two steps.
    """

    __slots__ = ("_memory", "_stats", "drafter")

    def __init__(self, memory: KVCacheManager, drafter: Drafter | None, stats: SchedulerStats) -> None:
        self._memory = memory
        self.drafter = drafter
        self._stats = stats

    def look_ahead(self, sequence: Sequence, spare: int, reserved: Reserved) -> bool:
        """Get slots for a sequence's next token and for drafts behind it; False, and no slots, where there are none.

        Nobody loses memory for the sake of drafts, and none are verified that the sequence could not use.

        Args:
            sequence: with one token to compute.
            spare: tokens of the budget that are left.
            reserved: what is left to others.
        """
        drafter, memory = self.drafter, self._memory
        if drafter is None or sequence.request.params.strategy is not None or sequence.request.search is not None:
            return False
        num_tokens = len(sequence.tokens)
        limit = min(spare, sequence.max_tokens - num_tokens - 1)
        if limit < 1 or num_tokens == sequence.num_prompt:
            return False
        limit = memory.step_limit(sequence.seq_id, 1 + limit) - 1
        draft = tuple(drafter.propose(sequence, limit)) if limit > 0 else ()
        if not draft or not memory.arena.can_hold(self._room(len(draft), reserved)):
            return False
        if not memory.append_slots((sequence.seq_id,), 1, lookahead=len(draft)):
            return False
        sequence.draft = draft
        return True

    def _room(self, num_drafted: int, reserved: Reserved) -> list[int]:
        """Return the blocks of each group that must be there for drafts to take theirs."""
        # A copy of the last block, and the blocks that the drafts fill; of a state a copy.
        num_blocks = reserved.num_blocks + 2 + num_drafted // self._memory.block_size
        num_states = reserved.num_states + 1
        return [num_states if group.carries else num_blocks for group in self._memory.groups]

    def keep(self, sequence: Sequence, num_tokens: int) -> None:
        """Keep of what was computed for drafts what turned out right; states that went further begin again.

        Args:
            sequence: whose drafts were verified, with the tokens that came of it.
            num_tokens: what is of so many first tokens of it is kept.
        """
        memory, seq_id, num_drafted = self._memory, sequence.seq_id, len(sequence.draft)
        end = sequence.num_computed + 1 + num_drafted
        num_accepted = num_tokens - sequence.num_computed - 1
        if self.drafter is not None:
            self.drafter.note(sequence, num_drafted, num_accepted)
        self._stats.note_drafts(num_drafted, num_accepted)
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        sequence.draft = ()
        kept = memory.rollback.point(seq_id, num_tokens)
        if kept < end:
            memory.truncate(seq_id, kept)
        memory.publish(seq_id, kept)
        sequence.num_computed = kept
