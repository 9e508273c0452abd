"""Preemption: whose memory is taken when a running sequence cannot grow, and how it is given back.

A sequence that loses its memory gets it back in one of two ways. It waits and computes its tokens again (*recompute*);
or its blocks are moved to the host and back (*swap*), together with those of all running samples of its request, so
that they share afterwards what they shared before (M8).

Only sequences behind the one that grows are candidates, whatever the policy, and who is out comes back in order. So
the first in order of all always advances; the running ones before a victim finish, nobody behind it is let in
meanwhile, and at last it is the first itself. Nobody starves, and a victim is taken again only for someone before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Candidates
from dataclasses import dataclass
from typing import NamedTuple

from quire.memory.manager import KVCacheManager
from quire.memory.ops import MemoryOps
from quire.memory.status import Verdict
from quire.scheduling.policies import PREEMPTION_POLICIES
from quire.scheduling.queues import Queues
from quire.scheduling.roster import Roster
from quire.scheduling.stats import SchedulerStats
from quire.sequences.sequence import Sequence
from quire.sequences.status import SequenceStatus

PREEMPTION_MODES = ("auto", "recompute", "swap")


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """How fast the two ways back are: guesses, until the engine has measured them.

    Args:
        copy_bytes_per_s: bytes that move between the tiers in a second.
        prefill_tokens_per_s: tokens that are computed in a second when many are at once.
    """

    copy_bytes_per_s: float = 4e9
    prefill_tokens_per_s: float = 1e3


class Loss(NamedTuple):
    """What it would cost to take memory in one way.

    Args:
        victims: who loses it.
        is_swap: their blocks go to the host.
        cost_s: seconds of computing again, or of moving there and back.
        freed_bytes: what others can have then.
    """

    victims: tuple[Sequence, ...]
    is_swap: bool
    cost_s: float
    freed_bytes: int

    @property
    def waste(self) -> float:
        """Seconds for each byte."""
        return self.cost_s / self.freed_bytes if self.freed_bytes else float("inf")


class Preemption:
    """Takes the memory of running sequences.

    Args:
        memory: the manager.
        queues: of the scheduler.
        roster: has searches begin again.
        stats: counted in.
        policy: a name in `PREEMPTION_POLICIES`.
        mode: "recompute"; "swap", wherever a family and the host allow it; or "auto", what wastes less. Without a host
            tier all are "recompute".

    Attributes:
        costs: what "auto" and policies reckon with.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        queues: Queues,
        roster: Roster,
        stats: SchedulerStats,
        *,
        policy: str,
        mode: str,
    ) -> None:
        self.costs = SwapCosts()
        self._memory = memory
        self._queues = queues
        self._roster = roster
        self._stats = stats
        self._choose = PREEMPTION_POLICIES[policy]
        self._mode = mode if memory.usage().host else "recompute"

    def take_from(self, candidates: Candidates[Sequence]) -> None:
        """Take the memory of one running sequence, or of its whole family.

        Args:
            candidates: in order, none of them part of the step; all that come after the one that needs memory.
        """
        victim = self._choose(candidates, lambda sequence: self._loss(sequence, candidates).waste)
        loss = self._loss(victim, candidates)
        self._stats.num_preemptions += len(loss.victims)
        victim.request.num_preemptions += len(loss.victims)
        if loss.is_swap:
            self._memory.swap_out([sequence.seq_id for sequence in loss.victims])
            self._stats.num_swaps += len(loss.victims)
            for sequence in loss.victims:
                self._queues.move(sequence, SequenceStatus.SWAPPED)
        else:
            self._stats.wasted_tokens += _num_computed(victim)
            self.drop(victim)

    def drop(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Free what a sequence holds, on either tier; it waits in its old place and computes its tokens again.

        A beam takes all of its search with it, which waits as the prompt that it began with.

        Args:
            sequence: running or swapped out.
            is_sound: see `KVCacheManager.free`.
        """
        if sequence.is_beam:
            self._roster.restart(sequence.request)
            return
        self._memory.free(sequence.seq_id, retain=sequence.request.retain_cache, is_sound=is_sound)
        self._queues.close(sequence)
        sequence.num_computed = 0
        self._queues.move(sequence, SequenceStatus.WAITING)

    def recover(self, ops: MemoryOps) -> tuple[str, ...]:
        """Have sequences compute their tokens again that hold blocks which copies were to write; nothing hits those.

        Args:
            ops: of a step that failed, whose own sequences have ended.

        Returns:
            The names of pins that are lost.
        """
        lost = self._memory.holders_of(ops)
        for seq_id in lost.seq_ids:
            sequence = self._roster.sequences.get(seq_id)
            if sequence is not None:  # else it went with another beam of its search
                self._stats.num_preemptions += 1
                self._stats.wasted_tokens += _num_computed(sequence)
                sequence.request.num_preemptions += 1
                self.drop(sequence, is_sound=False)
        for name in lost.pins:
            self._memory.unpin(name)
        self._memory.discard_copies(ops)
        return lost.pins

    def _loss(self, victim: Sequence, candidates: Candidates[Sequence]) -> Loss:
        """Return the better way, or the one that was asked for, to take a sequence's memory."""
        victims = tuple(victim.request.unfinished) if victim.is_beam else (victim,)
        release = self._memory.capacity.would_release([sequence.seq_id for sequence in victims])
        lost_tokens = _num_computed(victim) if victim.is_beam else release.lost_tokens
        lost_s = lost_tokens / self.costs.prefill_tokens_per_s
        recompute = Loss(victims, False, lost_s, release.freed_bytes)
        swap = None if self._mode == "recompute" else self._swap_loss(victim, candidates)
        if swap is None:
            return recompute
        return swap if self._mode == "swap" else min(recompute, swap, key=lambda loss: loss.waste)

    def _swap_loss(self, victim: Sequence, candidates: Candidates[Sequence]) -> Loss | None:
        """Return what swapping the family of a sequence would cost; None where it cannot be swapped as one."""
        samples = victim.request.sequences
        family = tuple(sequence for sequence in samples if sequence.status is SequenceStatus.RUNNING)
        # Samples stand side by side in order: behind the first of them that is a candidate all are.
        if min(family, key=lambda sequence: sequence.key).key < candidates[0].key:
            return None
        seq_ids = [sequence.seq_id for sequence in family]
        if self._memory.capacity.can_swap_out(seq_ids).verdict is not Verdict.OK:
            return None
        moved_bytes = 2 * self._memory.capacity.swap_size(seq_ids).num_bytes
        freed_bytes = self._memory.capacity.would_release(seq_ids).freed_bytes
        return Loss(family, True, moved_bytes / self.costs.copy_bytes_per_s, freed_bytes)


def _num_computed(victim: Sequence) -> int:
    """Return the tokens that were computed for a sequence; for a search, those of its prompt and of all its beams."""
    search = victim.request.search
    return victim.num_prompt + search.num_computed if search is not None and victim.is_beam else victim.num_computed
