"""Preemption: a running sequence loses its memory when an earlier one cannot grow.

A preempted sequence resumes in one of two ways. It waits and computes its tokens again (*recompute*); or its blocks are
moved to the host and back (*swap*), together with the blocks of all running samples of its request, so that
the samples share the same blocks afterwards (M8).

Under every policy, only sequences after the one that needs memory are candidates, and sequences are resumed in order.
So the first sequence in order always advances. The running sequences before a victim finish, no sequence after it is
admitted meanwhile, and finally the victim is the first. No sequence starves, and a victim is preempted again only for
an earlier sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from quire.memory.manager import KVCacheManager
from quire.memory.results import Verdict
from quire.scheduling.beam_groups import lockstep_group
from quire.scheduling.plan import StepPlan
from quire.scheduling.policies import PREEMPTION_POLICIES
from quire.scheduling.queues import Queues
from quire.scheduling.registry import SequenceRegistry
from quire.scheduling.stats import SchedulerStats
from quire.sequences.sequence import Sequence
from quire.sequences.status import SequenceStatus


@dataclass(frozen=True, slots=True)
class TransferRates:
    """Rates of swapping and recomputing: defaults until the engine has measured them.

    Args:
        copy_bytes_per_s: bytes copied between the tiers per second.
        prefill_tokens_per_s: tokens computed per second in a prefill.
    """

    copy_bytes_per_s: float = 4e9
    prefill_tokens_per_s: float = 1e3


class PreemptionCost(NamedTuple):
    """Cost of preempting sequences in one way.

    Args:
        victims: sequences that lose their memory.
        is_swap: True if their blocks are swapped out.
        cost_s: seconds of recomputing, or of swapping out and in.
        freed_bytes: bytes that become available to other sequences.
    """

    victims: tuple[Sequence, ...]
    is_swap: bool
    cost_s: float
    freed_bytes: int

    @property
    def waste(self) -> float:
        """Cost in seconds per freed byte."""
        return self.cost_s / self.freed_bytes if self.freed_bytes else float("inf")


class Preemption:
    """Preemption of running sequences.

    Args:
        memory: manager of the KV cache.
        queues: queues of the scheduler.
        registry: registry of the sequences, which restarts searches.
        stats: counters of the scheduler.
        policy: name in `PREEMPTION_POLICIES`.
        mode: "recompute"; "swap", if the siblings and the host tier allow it; or "auto", the cheaper of both.
            Without a host tier every mode is "recompute".

    Attributes:
        rates: rates from which "auto" and the policies estimate costs.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        queues: Queues,
        registry: SequenceRegistry,
        stats: SchedulerStats,
        *,
        policy: str,
        mode: str,
    ) -> None:
        self.rates = TransferRates()
        self._memory = memory
        self._queues = queues
        self._registry = registry
        self._stats = stats
        self._choose = PREEMPTION_POLICIES[policy]
        self._mode = mode if memory.usage().host else "recompute"

    def preempt(self, candidates: Seq[Sequence]) -> None:
        """Preempt one running sequence with its lockstep group, or swap it out with all its siblings.

        Args:
            candidates: all sequences after the one that needs memory, in order; none of them is scheduled.
        """
        victim = self._choose(candidates, lambda sequence: self._cost(sequence, candidates).waste)
        cost = self._cost(victim, candidates)
        self._stats.num_preemptions += len(cost.victims)
        victim.request.num_preemptions += len(cost.victims)
        if cost.is_swap:
            self._memory.swap_out([sequence.seq_id for sequence in cost.victims])
            self._stats.num_swaps += len(cost.victims)
            for sequence in cost.victims:
                self._queues.move(sequence, SequenceStatus.SWAPPED)
        else:
            self._stats.wasted_tokens += _num_computed(victim)
            self.preempt_by_recompute(victim)

    def preempt_by_recompute(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Free a sequence's blocks on either tier; it waits at its old position and computes its tokens again.

        For a beam, all beams of its search are freed, and the search waits to start again from its prompt.

        Args:
            sequence: running or swapped sequence.
            is_sound: see `KVCacheManager.free`.
        """
        if sequence.is_beam:
            self._registry.restart(sequence.request)
            return
        self._memory.free(sequence.seq_id, retain=sequence.request.retain_cache, is_sound=is_sound)
        self._queues.close(sequence)
        sequence.num_computed = 0
        self._queues.move(sequence, SequenceStatus.WAITING)

    def recover(self, plan: StepPlan) -> tuple[str, ...]:
        """Recompute the sequences that hold target blocks of failed copies, and unpublish these blocks.

        Args:
            plan: plan of a failed step, whose sequences have ended.

        Returns:
            The names of the pins that are lost.
        """
        finished_ids = self._queues.finished_ids
        # No duplicates: a sequence may be finished and opened again by the same plan, and have ended with it.
        finished_ids[:] = dict.fromkeys((*plan.finished_ids, *finished_ids))
        lost = self._memory.lost_copies.holders_of(plan.ops)
        for seq_id in lost.seq_ids:
            sequence = self._registry.sequences.get(seq_id)
            if sequence is not None:  # otherwise it ended together with another beam of its search
                self.discard(sequence)
        for name in lost.pins:
            self._memory.unpin(name)
        self._memory.lost_copies.discard(plan.ops)
        return lost.pins

    def discard(self, sequence: Sequence) -> None:
        """Have a sequence computed again, since a failed step may have left garbage in its blocks."""
        self._stats.num_preemptions += 1
        self._stats.wasted_tokens += _num_computed(sequence)
        sequence.request.num_preemptions += 1
        self.preempt_by_recompute(sequence, is_sound=False)

    def _cost(self, victim: Sequence, candidates: Seq[Sequence]) -> PreemptionCost:
        """Return the cost of preempting a sequence in the configured mode."""
        victims = tuple(lockstep_group(victim))
        release = self._memory.capacity.would_release([sequence.seq_id for sequence in victims])
        lost_tokens = _num_computed(victim) if victim.is_beam else release.lost_tokens
        lost_s = lost_tokens / self.rates.prefill_tokens_per_s
        recompute = PreemptionCost(victims, False, lost_s, release.freed_bytes)
        swap = None if self._mode == "recompute" else self._swap_cost(victim, candidates)
        if swap is None:
            return recompute
        return swap if self._mode == "swap" else min(recompute, swap, key=lambda cost: cost.waste)

    def _swap_cost(self, victim: Sequence, candidates: Seq[Sequence]) -> PreemptionCost | None:
        """Return the cost of swapping all running samples of a request; None if they cannot be swapped together."""
        samples = victim.request.sequences
        siblings = tuple(sequence for sequence in samples if sequence.status is SequenceStatus.RUNNING)
        # Samples are adjacent in the queue: if the first of them is a candidate, all are.
        if min(siblings, key=lambda sequence: sequence.key).key < candidates[0].key:
            return None
        seq_ids = [sequence.seq_id for sequence in siblings]
        if self._memory.capacity.can_swap_out(seq_ids).verdict is not Verdict.OK:
            return None
        moved_bytes = 2 * self._memory.capacity.swap_size(seq_ids).num_bytes
        freed_bytes = self._memory.capacity.would_release(seq_ids).freed_bytes
        return PreemptionCost(siblings, True, moved_bytes / self.rates.copy_bytes_per_s, freed_bytes)


def _num_computed(victim: Sequence) -> int:
    """Return the number of computed tokens of a sequence; for a beam, of the prompt and all beams."""
    search = victim.request.search
    return victim.num_prompt + search.num_computed if search is not None and victim.is_beam else victim.num_computed
