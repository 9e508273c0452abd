"""Preemption: whose memory is taken when a running sequence cannot grow, and how it is given back.

A sequence that loses its memory gets it back in one of two ways. It waits and computes its tokens again (*recompute*);
or its blocks are moved to the host and back (*swap*), together with those of all running samples of its request, so
that they share afterwards what they shared before (M8).

Only sequences behind the one that grows are candidates, whatever the policy, and who is out comes back in order. So
the first in order of all always advances; the running ones before a victim finish, nobody behind it is let in
meanwhile, and at last it is the first itself. Nobody starves, and a victim is taken again only for someone before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from quire.memory.manager import KVCacheManager
from quire.memory.results import MemoryOps, Verdict
from quire.scheduling.beam_groups import lockstep_group
from quire.scheduling.policies import PREEMPTION_POLICIES
from quire.scheduling.queues import Queues
from quire.scheduling.registry import SequenceRegistry
from quire.scheduling.stats import SchedulerStats
from quire.sequences.sequence import Sequence
from quire.sequences.status import SequenceStatus

PREEMPTION_MODES = ("auto", "recompute", "swap")


@dataclass(frozen=True, slots=True)
class TransferRates:
    """Rates of swapping and of recomputing: guesses, until the engine has measured them.

    Args:
        copy_bytes_per_s: bytes copied between the tiers in a second.
        prefill_tokens_per_s: tokens computed in a second when many are computed at once.
    """

    copy_bytes_per_s: float = 4e9
    prefill_tokens_per_s: float = 1e3


class PreemptionCost(NamedTuple):
    """Cost of preempting sequences in one way.

    Args:
        victims: sequences that lose their memory.
        is_swap: True where their blocks move to the host.
        cost_s: seconds of recomputing, or of moving there and back.
        freed_bytes: bytes that become available to others.
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
    """Preempts running sequences.

    Args:
        memory: the manager.
        queues: queues of the scheduler.
        registry: registry of the sequences, which restarts searches.
        stats: counters of the scheduler.
        policy: a name in `PREEMPTION_POLICIES`.
        mode: "recompute"; "swap", wherever the siblings and the host allow it; or "auto", what wastes less. Without a
            host tier all are "recompute".

    Attributes:
        rates: rates that "auto" and the policies estimate costs with.
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
        """Free the blocks of a sequence on either tier; it waits in its old position and computes its tokens again.

        With a beam, all beams of its search are freed, and the search waits to start again from its prompt.

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

    def recover(self, ops: MemoryOps) -> tuple[str, ...]:
        """Have sequences compute their tokens again that hold blocks which copies were to write; nothing hits those.

        Args:
            ops: of a step that failed, whose own sequences have ended.

        Returns:
            The names of pins that are lost.
        """
        lost = self._memory.holders_of(ops)
        for seq_id in lost.seq_ids:
            sequence = self._registry.sequences.get(seq_id)
            if sequence is not None:  # else it went with another beam of its search
                self._stats.num_preemptions += 1
                self._stats.wasted_tokens += _num_computed(sequence)
                sequence.request.num_preemptions += 1
                self.preempt_by_recompute(sequence, is_sound=False)
        for name in lost.pins:
            self._memory.unpin(name)
        self._memory.discard_copies(ops)
        return lost.pins

    def _cost(self, victim: Sequence, candidates: Seq[Sequence]) -> PreemptionCost:
        """Return the cost of the cheaper way, or of the configured one, to preempt a sequence."""
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
        """Return the cost of swapping all running samples of a request; None where they cannot be swapped together."""
        samples = victim.request.sequences
        siblings = tuple(sequence for sequence in samples if sequence.status is SequenceStatus.RUNNING)
        # Samples are side by side in the queue: after the first of them that is a candidate all are.
        if min(siblings, key=lambda sequence: sequence.key).key < candidates[0].key:
            return None
        seq_ids = [sequence.seq_id for sequence in siblings]
        if self._memory.capacity.can_swap_out(seq_ids).verdict is not Verdict.OK:
            return None
        moved_bytes = 2 * self._memory.capacity.swap_size(seq_ids).num_bytes
        freed_bytes = self._memory.capacity.would_release(seq_ids).freed_bytes
        return PreemptionCost(siblings, True, moved_bytes / self.rates.copy_bytes_per_s, freed_bytes)


def _num_computed(victim: Sequence) -> int:
    """Return the tokens that were computed for a sequence; for a search, those of its prompt and of all its beams."""
    search = victim.request.search
    return victim.num_prompt + search.num_computed if search is not None and victim.is_beam else victim.num_computed
