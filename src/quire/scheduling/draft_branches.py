"""Branches: alternative drafts of a sequence, which a step verifies as forks of the sequence.

```
 tokens    |<-- computed, shared by all -->| x | a b c     the sequence and its draft
                                           | x | d e       branch 1
                                           | x | f         branch 2
```

A branch is a sequence of the memory manager and of the data plane for the duration of one step. Like every fork it has
block tables of its own, and copies the last block on write; so kernels need no tree masks, and any kind of cache can
have branches, also recurrent states. It computes the sequence's last token `x` again, for its own copy of the block.

If a branch has the token that was sampled after `x`, and the draft has not, the sequence takes over the blocks of the
branch. Otherwise they are released, and so they are at once where the sequence ends while the step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.memory.manager import KVCacheManager
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence
from quire.sequences.sequence import Sequence


class Branch:
    """An open branch.

    Args:
        seq_id: its id in the memory manager and in the data plane.
        tokens: its own list of tokens.
        draft: its tokens after the sequence's last one.
    """

    __slots__ = ("draft", "seq_id", "tokens")

    def __init__(self, seq_id: int, tokens: list[int], draft: tuple[int, ...]) -> None:
        self.seq_id, self.tokens, self.draft = seq_id, tokens, draft


class Choice(NamedTuple):
    """Choice for a sequence that has branches.

    Args:
        sequence: the sequence.
        num_drafted: number of tokens of all its branches.
        num_wrong: number of leading branches that are wrong from their first tokens on, as the first draft is; 0 where
            that is right, or the sequence's item failed.
        branch: the branch after them, with which the sequence goes on; None for no branch.
    """

    sequence: Sequence
    num_drafted: int
    num_wrong: int
    branch: Branch | None


class DraftBranches:
    """Opens, chooses and closes branches.

    Args:
        memory: manager of the KV cache.
        new_id: function that returns an unused sequence id.
        finished_ids: see `Queues`.

    Attributes:
        seq_ids: ids of the open branches.
    """

    __slots__ = ("_chosen", "_finished_ids", "_memory", "_new_id", "_open", "_unplanned", "seq_ids")

    def __init__(self, memory: KVCacheManager, new_id: Callable[[], int], finished_ids: list[int]) -> None:
        self._memory = memory
        self._new_id = new_id
        self._finished_ids = finished_ids
        self._open: dict[Sequence, list[Branch]] = {}
        self._unplanned: list[Sequence] = []
        self._chosen: dict[Sequence, Branch] = {}
        self.seq_ids: set[int] = set()

    def open(self, sequence: Sequence, drafts: Seq[tuple[int, ...]]) -> None:
        """Fork a sequence for each draft, with slots for its last token and the draft, as long as there are blocks.

        Args:
            sequence: sequence without slots for its last token.
            drafts: drafts of the branches.
        """
        for draft in drafts:
            branch = Branch(self._new_id(), sequence.tokens.copy(), draft)
            self._memory.fork(sequence.seq_id, branch.seq_id, branch.tokens)
            if not self._memory.append_slots((branch.seq_id,), 1, lookahead=len(draft)):
                self._memory.free(branch.seq_id, is_sound=False)
                break
            self.seq_ids.add(branch.seq_id)
            if sequence not in self._open:
                self._open[sequence] = []
                self._unplanned.append(sequence)
            self._open[sequence].append(branch)

    def take_items(self) -> tuple[ScheduledSequence, ...]:
        """Return the plan's items of the branches that were opened since the last call."""
        items = []
        for sequence in self._unplanned:
            branches, new_sequence, start = self._open[sequence], NewSequence.of(sequence), sequence.num_computed
            deltas = self._memory.take_table_deltas([branch.seq_id for branch in branches])
            for branch, table_deltas in zip(branches, deltas, strict=True):
                token_ids, num_draft = (sequence.tokens[start], *branch.draft), len(branch.draft)
                items.append(
                    ScheduledSequence(branch.seq_id, start, token_ids, table_deltas, 1, new_sequence, num_draft)
                )
        self._unplanned.clear()
        return tuple(items)

    def choose(
        self, items: Seq[ScheduledSequence], results: Seq[ItemResult], sequences: list[Sequence | None]
    ) -> list[Choice]:
        """Choose a branch for each sequence whose draft is wrong from its first token on; close all others of the plan.

        Args:
            items, results: all items of the executed plan, and their results.
            sequences: sequence of each item; None for branches, and for sequences that have ended. A sequence that goes
                on with a branch is moved to the item of the branch.

        Returns:
            The choice for each sequence with branches.
        """
        places = {item.seq_id: idx for idx, item in enumerate(items)}
        choices: list[Choice] = []
        for sequence in [sequence for sequence in self._open if sequence.seq_id in places]:
            place, branches = places[sequence.seq_id], self._open.pop(sequence)
            choice = _choose(sequence, results[place], branches, [results[places[each.seq_id]] for each in branches])
            choices.append(choice)
            if choice.branch is not None:
                self._chosen[sequence] = choice.branch
                branches.remove(choice.branch)
                sequences[place], sequences[places[choice.branch.seq_id]] = None, sequence
            for branch in branches:
                self._close(branch)
        return choices

    def seq_id_of(self, sequence: Sequence) -> int:
        """Return the id of the branch that was chosen for a sequence, which gets its new tokens; else its own id."""
        branch = self._chosen.get(sequence)
        if branch is None:
            return sequence.seq_id
        branch.tokens += sequence.tokens[len(branch.tokens) :]
        return branch.seq_id

    def take_over(self, sequence: Sequence) -> None:
        """Replace the blocks of a sequence by those of the branch that was chosen for it.

        All slots of the branch are computed. The data plane opens the sequence again, with the tokens of the branch.
        """
        branch = self._chosen.pop(sequence)
        self._memory.free(sequence.seq_id, is_sound=False)
        sequence.chain = self._memory.fork(branch.seq_id, sequence.seq_id, sequence.tokens)
        self._close(branch)
        sequence.is_open = False
        self._finished_ids.append(sequence.seq_id)

    def count(self, items: Seq[ScheduledSequence]) -> int:
        """Return how many of a plan's items are branches."""
        return sum([item.seq_id in self.seq_ids for item in items])

    def close_of(self, sequence: Sequence) -> None:
        """Close the branches of a sequence, if it has any."""
        for branch in self._open.pop(sequence, ()):
            self._close(branch)
        if sequence in self._unplanned:
            self._unplanned.remove(sequence)

    def _close(self, branch: Branch) -> None:
        self._memory.free(branch.seq_id, is_sound=False)
        self._finished_ids.append(branch.seq_id)
        self.seq_ids.discard(branch.seq_id)


def _choose(sequence: Sequence, result: ItemResult, branches: Seq[Branch], found: Seq[ItemResult]) -> Choice:
    """Return the choice for a sequence.

    Args:
        sequence: the sequence.
        result: result of its item.
        branches: its branches.
        found: results of their items.
    """
    num_drafted, first = sum(len(branch.draft) for branch in branches), result.token_ids[:1]
    if not first or first == (result.draft or sequence.draft)[:1]:  # its item failed, or its draft is right
        return Choice(sequence, num_drafted, 0, None)
    for idx, (branch, other) in enumerate(zip(branches, found, strict=True)):
        # A branch computes the logits of the first token in a row of its own, where rounding may lead to another token.
        if (other.draft or branch.draft)[:1] == first == other.token_ids[:1]:
            return Choice(sequence, num_drafted, idx, branch)
    return Choice(sequence, num_drafted, len(branches), None)
