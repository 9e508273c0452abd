"""Admission: waiting and swapped sequences become running ones, in order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import InvalidParameter, InvariantViolation, PromptTooLong
from quire.memory.manager import KVCacheManager
from quire.memory.results import AllocStatus, HitEnd, PrefixHit, Verdict
from quire.scheduling.beam_groups import append_to_group, lockstep_groups, slots_needed
from quire.scheduling.media_gate import MediaGate
from quire.scheduling.policies import Order
from quire.scheduling.preemption import Preemption
from quire.scheduling.queues import Queues
from quire.scheduling.stats import SchedulerStats
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import SequenceStatus


@dataclass(slots=True)
class StepBudget:
    """Tokens, slots and blocks that are left for admissions in a step.

    Args:
        scheduled: sequence -> number of its tokens in this step.
        num_tokens: number of tokens left in the budget.
        num_slots: number of `max_num_seqs` slots left.
        reserved: number of blocks of each group that running sequences still need.
    """

    scheduled: dict[Sequence, int]
    num_tokens: int
    num_slots: int
    reserved: list[int]


def _check_can_ever_fit(memory: KVCacheManager, request: Request) -> None:
    """Refuse a request that could not fit into an empty cache; beams are assumed to share only the prompt."""
    num_output = request.max_total_tokens - request.num_prompt
    width = request.params.beam_width or 1

    def is_too_long(num_prompt: int) -> bool:
        return not memory.capacity.can_ever_hold(num_prompt + num_output, width=width, num_shared=num_prompt)

    if not is_too_long(request.num_prompt):
        return
    # Among prompts that end one token before a block boundary, fitting is monotonic in length, but for beams in windows
    # and chunks: bisect these. All prompts shorter than the longest such prompt that fits also fit.
    size = memory.block_size
    ends = range(size - 1, request.num_prompt + size, size)
    limit = max(0, ends[0] + size * (bisect_left(ends, True, key=is_too_long) - 1))
    if limit < request.num_prompt:
        limit = next(length for length in range(limit, request.num_prompt) if is_too_long(length + 1))
    else:  # if a longer prompt of beams fits, so does one that is a little shorter
        limit = next((length for length in range(request.num_prompt - 1, 0, -1) if not is_too_long(length)), 0)
    beams = "" if width == 1 else f", for each of {width} beams"
    raise PromptTooLong(request.num_prompt, limit, f"the KV cache (with room for the output asked for{beams})")


class Admission:
    """Admission of sequences strictly in order: a sequence that does not fit blocks all later ones, so none starves."""

    def __init__(
        self,
        memory: KVCacheManager,
        queues: Queues,
        stats: SchedulerStats,
        preemption: Preemption,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefetch: Callable[[Sequence], bool] | None = None,
        media: MediaGate | None = None,
        order: Order,
        whole_prompts: bool = False,
    ) -> None:
        self._memory = memory
        self._queues = queues
        self._stats = stats
        self._preemption = preemption
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefetch, self._media = prefetch, media
        self._order = order
        self._whole_prompts = whole_prompts
        self.limit = max_num_seqs
        # Whether a waiting sequence may preempt running ones of a lower priority; the two methods for it are for this.
        self.has_priorities = order.has_priorities

    def check(self, request: Request) -> None:
        """Refuse a request that could never be admitted."""
        params = request.params
        if not 0 < request.num_prompt < request.max_total_tokens:
            raise ValueError(f"{request.num_prompt} prompt tokens leave no room within {request.max_total_tokens}")
        if params.num_sequences > self._max_num_seqs:
            name = "n" if params.beam_width is None else "beam_width"
            raise InvalidParameter(name, params.num_sequences, f"at most max_num_seqs ({self._max_num_seqs})")
        if self._whole_prompts and request.num_prompt > self._max_num_batched_tokens:
            raise PromptTooLong(request.num_prompt, self._max_num_batched_tokens, "the token budget of a step")
        self._check_least_step(request)
        _check_can_ever_fit(self._memory, request)

    def _check_least_step(self, request: Request) -> None:
        """Refuse a medium that sees itself, and that no step can have whole."""
        if (least := request.least_step) == 1:
            return
        most = self._max_num_batched_tokens - self._max_num_seqs  # each of the others may have a token in the step
        if least > most:
            raise InvalidParameter("prompt", f"an image of {least} tokens", f"one with images of at most {most} tokens")
        if not self._memory.capacity.can_step(request.max_total_tokens, least):
            allowed = "one whose images fit into the KV cache whole, after what their rows see"
            raise InvalidParameter("prompt", f"an image of {least} tokens", allowed)

    @property
    def _has_running(self) -> bool:
        """True while there are running sequences, which free memory when they end."""
        return bool(self._queues.running or self._queues.held)

    @property
    def outranks_running(self) -> bool:
        """True while the first waiting or swapped sequence could preempt running ones by its priority."""
        first = self._queues.first_not_running()
        return first is not None and any(self._order.outranks(first.request, s.request) for s in self._queues.running)

    def preempt_lower_priority(self) -> bool:
        """Preempt running sequences of a lower priority if the first waiting or swapped sequence lacks memory.

        No sequence is preempted if the memory of all of them would not be enough.
        """
        first = self._queues.first_not_running() if self.limit else None
        has_preempted = False
        while first is not None:
            lower = [s for s in self._queues.running if self._order.outranks(first.request, s.request)]
            if not lower or not self._is_prefetched(first) or not self._needs_memory_of(first, lower):
                break
            self._preemption.preempt(lower)
            has_preempted = True
        return has_preempted

    def _is_prefetched(self, sequence: Sequence) -> bool:
        """Return whether the prefix of a sequence may be matched now; a swapped sequence needs no match."""
        return self._prefetch is None or sequence.status is SequenceStatus.SWAPPED or self._prefetch(sequence)

    def _needs_memory_of(self, first: Sequence, lower: list[Sequence]) -> bool:
        """Return whether `first` lacks memory (or slots), and preempting all sequences in `lower` would free enough."""
        memory, is_swapped = self._memory, first.status is SequenceStatus.SWAPPED
        coming = self._swapped_siblings(first) if is_swapped else [first]
        budget, num_slots = self._budget_left({}, 1, min_pending=1), sum(map(slots_needed, coming))
        if num_slots > budget.num_slots + sum(map(slots_needed, lower)):
            return False
        if is_swapped:
            status = self._swap_in_status(coming, budget)
        else:
            status = self._allocate_status(first, self._match(first), budget)
        if status.verdict is Verdict.OK:
            return num_slots > budget.num_slots
        # An upper bound, in bytes of the limiting group: other sequences may hold some of the blocks too.
        num_lacking = status.needed - status.available - sum(self._missing(s)[status.group_idx] for s in lower)
        lacking_bytes = num_lacking * memory.groups[status.group_idx].spec.bytes_per_block
        return memory.capacity.would_release([s.seq_id for s in lower]).freed_bytes >= lacking_bytes

    def admit_waiting(self, scheduled: dict[Sequence, int], num_tokens: int) -> None:
        """Admit waiting and swapped sequences, in order, until tokens, slots or memory run out."""
        budget = self._budget_left(scheduled, num_tokens)
        if self.limit < self._max_num_seqs:
            budget.num_slots = min(budget.num_slots, self.limit - sum(map(slots_needed, self._queues.running)))
        while budget.num_tokens > 0:
            first = self._queues.first_not_running()
            if first is None:
                break
            is_swapped = first.status is SequenceStatus.SWAPPED
            if not (self._swap_in(first, budget) if is_swapped else self._admit(first, budget)):
                break

    def _budget_left(self, scheduled: dict[Sequence, int], num_tokens: int, min_pending: int = 2) -> StepBudget:
        """Return the tokens, slots and blocks that running sequences leave for admissions."""
        running = [*self._queues.running, *self._queues.held]
        num_slots = self._max_num_seqs - sum(map(slots_needed, running))
        budget = StepBudget(scheduled, num_tokens, num_slots, [0] * len(self._memory.groups))
        for sequence in running:
            if sequence.num_pending >= min_pending:
                self._reserve(budget, sequence)
        return budget

    def _admit(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Admit a waiting sequence on its longest prefix hit and schedule its first tokens, if all its tokens fit."""
        memory, num_tokens = self._memory, len(sequence.tokens)
        if slots_needed(sequence) > budget.num_slots or not self._is_prefetched(sequence):
            return False
        if self._whole_prompts and num_tokens > budget.num_tokens:
            return False
        hit = self._match(sequence)
        step = self._max_num_batched_tokens
        status = self._allocate_status(sequence, hit, budget)
        if status.verdict is Verdict.LATER and not self._has_running:
            # Without running sequences, it is enough if the sequence fits one token a step, or one image.
            step = sequence.request.least_step
            status = memory.capacity.can_allocate(num_tokens, hit, step)
        if status.verdict is Verdict.LATER:
            return False
        if status.verdict is Verdict.NEVER:
            raise InvariantViolation("S3", f"sequence {sequence.seq_id} can never fit: {status}")
        memory.allocate(sequence.seq_id, sequence.chain, hit)
        count = memory.step_limit(sequence.seq_id, min(num_tokens - hit.num_tokens, budget.num_tokens))
        if self._media is not None:
            count = min(count, self._media.limit(sequence, hit.num_tokens))
        count = sequence.request.whole_media(hit.num_tokens, count)
        while count and not memory.append_slots((sequence.seq_id,), count):
            if count <= step:
                raise InvariantViolation("S2", f"sequence {sequence.seq_id} was promised memory: {status}")
            count = sequence.request.whole_media(hit.num_tokens, max(count // 2, step))
        self._count_hit(sequence, hit)
        sequence.num_computed = hit.num_tokens
        self._enter(sequence, count, budget)
        return True

    def _match(self, sequence: Sequence) -> PrefixHit:
        """Return the longest prefix hit of a sequence, which ends inside no medium that sees itself."""
        request = sequence.request
        hit = self._memory.match_prefix(sequence.chain, request.hit_limit)
        while (end := request.whole_media(0, hit.num_tokens)) < hit.num_tokens:
            hit = self._memory.match_prefix(sequence.chain, end)
        return hit

    def _swap_in(self, first: Sequence, budget: StepBudget) -> bool:
        """Swap in the samples of a request, if all their tokens fit; samples that get slots are scheduled.

        While no sequence runs, samples that do not fit together (they shared more blocks before they diverged) are
        preempted by recompute, the last one first, until the rest fits. So some sample, or the prompt of a search, is
        always resumed.
        """
        memory = self._memory
        siblings = self._swapped_siblings(first)
        if sum(map(slots_needed, siblings)) > budget.num_slots:
            return False
        while self._swap_in_status(siblings, budget).verdict is not Verdict.OK:
            if self._has_running:
                return False
            self._preemption.preempt_by_recompute(siblings[-1])
            siblings = self._swapped_siblings(first)
            if not siblings:
                return True
        memory.swap_in([sequence.seq_id for sequence in siblings])
        for group in lockstep_groups(siblings):
            count = min(group[0].num_pending, budget.num_tokens // len(group))
            count = memory.step_limit(group[0].seq_id, count)
            if self._media is not None:
                count = min([count, *[self._media.limit(each, each.num_computed) for each in group]])
            count = group[0].request.whole_media(group[0].num_computed, count)
            if count and not append_to_group(memory, group, count):
                count = 0
            for sequence in group:
                self._enter(sequence, count, budget)
        return True

    def _swapped_siblings(self, first: Sequence) -> list[Sequence]:
        """Return the swapped samples of a sequence's request, which are swapped in together."""
        return [sequence for sequence in self._queues.swapped if sequence.request is first.request]

    def _allocate_status(self, sequence: Sequence, hit: PrefixHit, budget: StepBudget) -> AllocStatus:
        """Return whether a waiting sequence fits together with the running ones."""
        # Blocks for the first writes after a fork: beams that lacked them would have to be recomputed.
        num_beams = sequence.request.params.beam_width or 0
        reserved = [count + num_beams for count in budget.reserved]
        return self._memory.capacity.can_allocate(len(sequence.tokens), hit, self._max_num_batched_tokens, reserved)

    def _swap_in_status(self, siblings: list[Sequence], budget: StepBudget) -> AllocStatus:
        """Return whether siblings fit together with the running sequences; if none runs, alone and one token a step."""
        seq_ids, lengths = [sequence.seq_id for sequence in siblings], [len(sequence.tokens) for sequence in siblings]
        step = self._max_num_batched_tokens if self._has_running else 1
        return self._memory.capacity.can_swap_in(seq_ids, lengths, step, budget.reserved)

    def _enter(self, sequence: Sequence, count: int, budget: StepBudget) -> None:
        """Move a sequence to the running queue, with `count` tokens in this step; 0 if it got no slots."""
        budget.num_slots -= slots_needed(sequence)
        budget.num_tokens -= count
        self._reserve(budget, sequence)
        self._queues.move(sequence, SequenceStatus.RUNNING)
        if count:
            budget.scheduled[sequence] = count

    def _reserve(self, budget: StepBudget, sequence: Sequence) -> None:
        """Reserve the blocks that a sequence still needs for its present tokens."""
        for idx, count in enumerate(self._missing(sequence)):
            budget.reserved[idx] += count

    def _missing(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the number of blocks of each group that a running sequence lacks for its present tokens."""
        capacity, step = self._memory.capacity, self._max_num_batched_tokens
        return capacity.blocks_missing(sequence.seq_id, len(sequence.tokens), step)

    def _count_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Count the prefix hit of an admission, separately for first-time and resumed sequences."""
        request, stats = sequence.request, self._stats
        num_queried = len(sequence.tokens)
        if hit.end is HitEnd.LIMIT:
            num_queried = hit.num_tokens
        num_staged = len({load.block_idx for load in hit.loads} & sequence.staged)
        account = hit.account(len(sequence.tokens), num_staged * self._memory.block_size)
        if request.account is None:
            request.record_hit(hit, account)
            stats.first_time = stats.first_time.plus(account)
            stats.prefix_queries += num_queried
            stats.prefix_hits += hit.num_tokens
        else:
            stats.resumed = stats.resumed.plus(account)
            stats.resumed_queries += num_queried
            stats.resumed_hits += hit.num_tokens
