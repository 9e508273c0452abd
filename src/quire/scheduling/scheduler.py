"""The scheduler: it selects the sequences of a step, with their numbers of tokens, and preempts if memory is short.

Prefill and decode are not separate phases. A sequence has pending tokens: one while it decodes, more while its prompt
(or, after a preemption, all of its tokens) is computed in chunks.

Memory is granted in policy order, so the first sequence always grows and always finishes. The token budget is granted
to decodes first: one token each is reserved before any chunk is cut.

Invariants: S1 to S6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import takewhile
from operator import attrgetter
from typing import Final, cast

from quire.errors import InvariantViolation
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import NO_OPS, MemoryOps, joined
from quire.scheduling.admission import Admission
from quire.scheduling.async_scheduling import PlansAhead
from quire.scheduling.beam_groups import append_to_group, beam_groups_of, lockstep_group
from quire.scheduling.decode_columns import DecodeItems, DecodeResults
from quire.scheduling.drafts import DraftSlots
from quire.scheduling.edits import SequenceEdits, SequenceEvent
from quire.scheduling.media_gate import MediaGate
from quire.scheduling.microbatches import Microbatches
from quire.scheduling.plan import BeamGroup, Candidate, ItemResult, NewSequence, ScheduledSequence, StepPlan
from quire.scheduling.policies import Order
from quire.scheduling.preemption import Preemption
from quire.scheduling.queues import Queues
from quire.scheduling.registry import SequenceRegistry
from quire.scheduling.scheduler_observer import SchedulerObserver
from quire.scheduling.stats import SchedulerStats
from quire.sequences.decoding.drafting import Drafter
from quire.sequences.decoding.stop import end_of_tokens
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason, SequenceStatus

_TOKEN_IDS: Final = attrgetter("token_ids")


class Scheduler:
    """Plans steps over the sequences of all requests.

    Args:
        memory: manager of the KV cache; only this scheduler commands it.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: token budget of a step; at least `max_num_seqs`.
        policy, priority_aging: see `Order`.
        preemption_policy: name in `PREEMPTION_POLICIES`; selects the sequence to preempt.
        preemption_mode: "recompute", "swap" or "auto"; see `Preemption`.
        prefetch: function called for each sequence before its prefix is matched; while it returns False, the sequence
            and all after it wait.
        media: decides which media can be computed; None for models whose media come with their features.
        drafter: drafter that proposes tokens; None disables drafts.
        whole_prompts: True to compute each prompt in one step, for models that see all of it at once.
        plans_ahead: True to plan a step before the results of the previous step are read; see `async_scheduling`.
        num_microbatches: number of plans in a pipeline of stages at the same time; None without a pipeline.

    Attributes:
        waiting, running, swapped: see `Queues`.
        drafts: reservation of draft slots; holds the drafter.
        preemption: preemption of sequences; holds the measured transfer rates.
        microbatches: plans in flight in a pipeline; None without a pipeline.
        plans_ahead: see the argument.
        chunk_tokens: maximum number of prompt tokens in a step with decoding sequences; None for the whole budget.
        observer: receives every command, if set.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
        priority_aging: int = 256,
        preemption_policy: str = "last",
        preemption_mode: str = "auto",
        prefetch: Callable[[Sequence], bool] | None = None,
        media: MediaGate | None = None,
        drafter: Drafter | None = None,
        whole_prompts: bool = False,
        plans_ahead: bool = False,
        num_microbatches: int | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{max_num_batched_tokens} tokens a step cannot serve {max_num_seqs} sequences")
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_tokens: int | None = None
        # Tokens that the largest chunk of a request so far has at least: images that see themselves are not cut.
        self._least_step = 1
        self.observer: SchedulerObserver | None = None
        self.stats = SchedulerStats()
        self._queues, self._media = Queues(), media
        order = Order(policy, priority_aging)
        self._registry = SequenceRegistry(memory, self._queues, order)
        self.drafts = DraftSlots(memory, drafter, self.stats, self._queues)
        self._edits = SequenceEdits(self._registry, self.drafts)
        # References to the same lists and dictionaries, not copies.
        self.waiting, self.running, self.swapped = self._queues.waiting, self._queues.running, self._queues.swapped
        self.requests, self.sequences = self._registry.requests, self._registry.sequences
        self.preemption = Preemption(
            memory, self._queues, self._registry, self.stats, policy=preemption_policy, mode=preemption_mode
        )
        self._admission = Admission(
            memory,
            self._queues,
            self.stats,
            self.preemption,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefetch=prefetch,
            media=media,
            order=order,
            whole_prompts=whole_prompts,
        )
        queues, sequences, admission = self._queues, self.sequences, self._admission
        self.plans_ahead = plans_ahead
        self._ahead: PlansAhead | None = None
        if plans_ahead:
            self._ahead = PlansAhead(memory, queues, sequences, self.drafts, admission, self._plan_as_it_is)
        self.microbatches: Microbatches | None = None
        if num_microbatches is not None:
            self.microbatches = Microbatches(
                num_microbatches, max_num_seqs, queues, sequences, admission, self._plan_step
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: it does not fit even an empty KV cache, or a step that must compute it whole.
            InvalidParameter: it has more samples or beams than can run at once.
            UnsupportedFeature: the observer refuses it.
            ValueError: its id is in use, or its prompt leaves no room within its own `max_total_tokens`.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id!r} exists already")
        self._admission.check(request)
        self._least_step = max(self._least_step, request.least_step)
        if self.observer is not None:
            self.observer.add(request)
        self._registry.add(request)
        if self._ahead is not None:
            self._ahead.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Sequence]:
        """End a request in any state, and free all that it holds.

        Args:
            request_id: id of the request; may be unknown or finished.
            reason: finish reason of the unfinished sequences.

        Returns:
            The sequences that were not finished; empty for an unknown request.
        """
        if self.observer is not None:
            self.observer.abort(request_id, reason)
        return self._edits.abort(request_id, reason)

    def plan_ahead(self, tick: int, in_flight: StepPlan) -> StepPlan | None:
        """Return the plan of the step after the one in flight; None if that one must be read first.

        Args:
            tick: number of the plan.
            in_flight: the last plan, whose results are not applied yet. Its sequences may have ended since.
        """
        if self._ahead is None:
            return None
        if self.observer is None:
            return self._ahead.plan(tick, in_flight)
        self.observer.plan_ahead(tick)
        plan = self._ahead.plan(tick, in_flight)
        if plan is not None:
            self.observer.planned(plan)
        return plan

    @property
    def draws_on_device(self) -> bool:
        """True if plans are made ahead and the device draws the next token of each running sequence."""
        return self._ahead is not None and self._ahead.draws_on_device

    @property
    def drafter(self) -> Drafter | None:
        """The drafter that proposes tokens, if any; none while a plan is made ahead."""
        return None if self._ahead is not None and self._ahead.is_planning else self.drafts.drafter

    @property
    def has_unfinished(self) -> bool:
        """True while any sequence waits, runs or is swapped out."""
        return bool(self._queues)

    # ---- a step ----

    def plan(self, tick: int) -> StepPlan:
        """Plan the next step: all running sequences that can grow, in policy order; see also `Microbatches`."""
        if self.observer is None:
            return self._plan(tick)
        self.observer.plan(tick)
        plan = self._plan(tick)
        self.observer.planned(plan)
        return plan

    def _plan(self, tick: int) -> StepPlan:
        if self._ahead is not None:
            self._ahead.begin(tick)
        return self._plan_step(tick) if self.microbatches is None else self.microbatches.plan(tick)

    def _plan_as_it_is(self, tick: int) -> StepPlan | None:
        """Plan a step ahead for the sequences that get their slots without a preemption; None if none does."""
        assert self._ahead is not None
        scheduled, spare = self._schedule_running()
        if spare > 0 and not self._ahead.is_short and (self.waiting or self.swapped):
            self._admission.admit_waiting(scheduled, spare)
        return self._plan_of(tick, scheduled) if scheduled else None

    def _plan_step(self, tick: int) -> StepPlan:
        has_preempted = self._admission.has_priorities and self._admission.preempt_lower_priority()
        preemptions_before = self.stats.num_preemptions
        scheduled, spare = self._schedule_running(leaves_room=has_preempted)
        if spare > 0 and self.stats.num_preemptions == preemptions_before and (self.waiting or self.swapped):
            self._admission.admit_waiting(scheduled, spare)
        if not scheduled and self.running:
            # Siblings were swapped in, and no block is left for a next token: the first of them preempts the others.
            scheduled, _ = self._schedule_running()
            if not scheduled and not self._queues.held and not (self._media is not None and self._media.is_closed):
                raise InvariantViolation("S3", "no running sequence can grow")
        if not scheduled:
            # Finished ids and copies wait for a plan that is executed.
            return StepPlan(tick, (), NO_OPS, ())
        return self._plan_of(tick, scheduled)

    def _plan_of(self, tick: int, scheduled: dict[Sequence, int]) -> StepPlan:
        """Return the plan of a step with these sequences; `scheduled` has their numbers of tokens."""
        # Block tables are final only now: an append may have moved blocks of sequences that were scheduled earlier.
        items = self._items(scheduled)
        finished_ids = tuple(self._queues.finished_ids)
        self._queues.finished_ids.clear()
        beams = beam_groups_of(scheduled, [item.num_samples for item in items]) if self._registry.num_searches else ()
        return StepPlan(tick, items, self.memory.take_ops(), finished_ids, beams)

    def take_ops(self) -> MemoryOps:
        """Return the planned copies that no step has made, because no step follows."""
        pending = [] if self.microbatches is None else self.microbatches.take_ops()
        return joined([*pending, self.memory.take_ops()])

    def update_from_results(self, items: Seq[ScheduledSequence], results: Seq[ItemResult]) -> list[SequenceEvent]:
        """Apply the results of a step: publish all items, then fork, append and finish item by item.

        Args:
            items: items of the executed plan, or some of them.
            results: result of each item.

        Returns:
            The events in order; none for an item whose sequence ended while the step ran. A `Fail` is only reported: it
            does not end the sequence.
        """
        if self.observer is not None:
            self.observer.update_from_results(items, results)
        drawn: Iterator[tuple[int, ...]]  # tokens of each item, without a Python call for each
        if isinstance(items, DecodeItems) and isinstance(results, DecodeResults):
            sequences, drawn = list(map(self.sequences.get, items.seq_ids)), zip(results.token_ids)
        else:
            find = self.sequences.get
            sequences, drawn = [find(item.seq_id) for item in items], map(_TOKEN_IDS, results)
        if isinstance(items, DecodeItems) and None not in sequences:
            self.memory.publish_next(items.seq_ids)
            for decoding in cast(list[Sequence], sequences):
                decoding.num_computed += 1
        else:
            computed: dict[int, int] = {}
            for item, sequence in zip(items, sequences, strict=True):
                if sequence is not None and not sequence.draft:
                    computed[item.seq_id] = sequence.num_computed = sequence.num_computed + len(item.token_ids)
            self.memory.publish_each(computed)
        events: list[SequenceEvent] = []
        for idx, (sequence, token_ids) in enumerate(zip(sequences, drawn, strict=True)):
            if sequence is None or sequence.finish_reason is not None:  # an edit before may have ended it
                continue
            tokens, edit = sequence.tokens, sequence.default_edit
            if sequence.draft:
                sequence.draft = results[idx].draft or sequence.draft
            elif edit is not None and len(token_ids) == 1 and end_of_tokens(sequence, token_ids[0]) is None:
                tokens.append(token_ids[0])
                events.append((idx, sequence, edit, len(tokens)))
                continue
            elif not token_ids and not results[idx].pooled:
                continue
            events += self._edits.apply(idx, sequence, token_ids, sequence.strategy.advance(sequence, token_ids))
        return events

    def withdraw(self, plan: StepPlan) -> tuple[str, ...]:
        """Undo a plan that was made ahead of a step that failed; return the names of the pinned prefixes lost.

        Its sequences are computed again, unless they ended with the failed step.

        Args:
            plan: plan whose results are not applied.
        """
        for item in plan.items:
            sequence = self.sequences.get(item.seq_id)
            if sequence is not None and sequence.status is SequenceStatus.RUNNING:
                self.preemption.discard(sequence)
        return self.recover(plan)

    def recover(self, plan: StepPlan) -> tuple[str, ...]:
        """Restore a consistent state after a plan's execution failed; return the names of the pinned prefixes lost.

        The finished ids of the plan are sent again with the next one. Sequences outside of the plan that hold blocks
        which its copies were to write are preempted and recomputed.

        Args:
            plan: failed plan; all of its sequences have ended.
        """
        return self.preemption.recover(plan)

    def advance_beams(self, groups: Seq[BeamGroup], found: Seq[tuple[Candidate, ...]]) -> list[SequenceEvent]:
        """Apply the candidates of a step after the results of its items; return the events in order, by group index.

        Args:
            groups: beam groups of the executed plan; groups whose request ended while the step ran are skipped.
            found: candidates of each group.
        """
        if self.observer is not None:
            self.observer.advance_beams(found)
        return self._edits.advance_beams(groups, found)

    def finish_at_stop_string(self, sequence: Sequence, stop: str) -> None:
        """End a sequence whose text has a stop string, which takes precedence over length and stop tokens."""
        if self.observer is not None:
            self.observer.finish_at_stop_string(sequence, stop)
        self._edits.finish_at_stop_string(sequence, stop)

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes, and the outputs that the drafter has kept; running sequences keep their blocks."""
        if self.observer is not None:
            self.observer.reset_prefix_cache()
        self.memory.reset_prefix_cache()
        if self.drafter is not None:
            self.drafter.reset()

    def pin(self, name: str, chain: TokenChain) -> int:
        """Hold a prefix in the prefix cache; see `KVCacheManager.pin`."""
        num_tokens = self.memory.pin(name, chain)
        if num_tokens and self.observer is not None:
            self.observer.pinned(name, chain, num_tokens)
        return num_tokens

    def unpin(self, name: str) -> None:
        """Release a pinned prefix."""
        self.memory.unpin(name)
        if self.observer is not None:
            self.observer.unpinned(name)

    # ---- parts of a plan ----

    def _schedule_running(self, *, leaves_room: bool = False) -> tuple[dict[Sequence, int], int]:
        """Append slots to running sequences, in order; return their numbers of tokens, and the rest of the budget."""
        running, memory = self.running, self.memory
        pending_counts = [len(sequence.tokens) - sequence.num_computed for sequence in running]
        num_decoding = pending_counts.count(1)
        # The sequence to admit has a slot, so at least one token is left for a running prompt.
        spare = self.max_num_batched_tokens - num_decoding - leaves_room
        if num_decoding and self.chunk_tokens is not None:
            spare = min(spare, max(self.chunk_tokens, self._least_step))
        limits = {} if self._media is None else self._media.limits(running)
        proposals = self.drafts.propose(pending_counts, spare) if self.drafter and not leaves_room else {}
        # The others decode, belong to no beam search and have no drafts; consecutive ones share a call.
        singles = {sequence for sequence, count in zip(running, pending_counts, strict=True) if count != 1}
        if self._registry.num_searches:
            singles |= {sequence for sequence in running if sequence.request.search is not None}
        singles |= proposals.keys() | limits.keys()
        scheduled, position = dict[Sequence, int](), 0
        # A preemption during the loop removes only sequences after the group, and not always the last ones.
        while position < len(running):
            rest = running[position:]
            decodes = list(takewhile(lambda sequence: sequence not in singles, rest)) if singles else rest
            if decodes:
                num_served = memory.append_slots([sequence.seq_id for sequence in decodes])
                scheduled |= dict.fromkeys(decodes[:num_served], 1)
                position += num_served
                if position == len(running):
                    break
            group = lockstep_group(running[position])
            first, pending = group[0], group[0].num_pending
            limit = min([limits.get(sequence, pending) for sequence in group]) if limits else pending
            drafted = proposals.get(first, ()) if limit else ()
            if drafted and (num_rows := self.drafts.reserve(first, position, drafted, spare)):
                spare -= num_rows
                scheduled[first] = 1
            else:
                count = min(pending, limit)
                if pending > 1:
                    count = memory.step_limit(first.seq_id, min(count, spare))
                    count = first.request.whole_media(first.num_computed, count)
                count = self._append_or_preempt(group, count, position)
                if pending > 1:
                    spare -= count
                if count:
                    scheduled |= dict.fromkeys(group, count)
            position += len(group)
        return scheduled, spare + leaves_room

    def _append_or_preempt(self, group: list[Sequence], count: int, position: int) -> int:
        """Append `count` slots to each sequence of a group; preempt sequences not scheduled yet if memory is short."""
        if self._ahead is not None and self._ahead.is_planning:
            return self._ahead.append(group, count)
        while count and not append_to_group(self.memory, group, count):
            unscheduled = self.running[position + len(group) :]
            if unscheduled:
                self.preemption.preempt(unscheduled)
            elif position or count <= (least := group[0].request.least_step):
                count = 0
            else:
                count = group[0].request.whole_media(group[0].num_computed, max(count // 2, least))
        return count

    def _items(self, scheduled: dict[Sequence, int]) -> tuple[ScheduledSequence, ...]:
        """Return the plan's items of the scheduled sequences; `scheduled` has their numbers of tokens."""
        deltas = self.memory.take_table_deltas([sequence.seq_id for sequence in scheduled])
        items: list[ScheduledSequence] = []
        # Same as `ScheduledSequence._make`, without a Python call.
        new = tuple.__new__
        for (sequence, count), table_deltas in zip(scheduled.items(), deltas, strict=True):
            tokens, start, draft, new_sequence = sequence.tokens, sequence.num_computed, sequence.draft, None
            token_ids = (tokens[start],) if count == 1 else tuple(tokens[start : start + count])
            if start + count < len(tokens):
                num_samples = 0
            else:
                num_samples = 1 if start >= sequence.num_prompt else sequence.strategy.num_draws(sequence)
            if draft:
                token_ids += draft
            if not sequence.is_open:
                new_sequence, sequence.is_open = NewSequence.of(sequence), True
            fields = (sequence.seq_id, start, token_ids, table_deltas, num_samples, new_sequence, len(draft))
            items.append(new(ScheduledSequence, fields))
        return tuple(items)
