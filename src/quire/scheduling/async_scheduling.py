"""Asynchronous scheduling: the next step is planned while a step runs, before the tokens of that step are read.

```
 host     plan N | plan N+1 | read N | plan N+2 | read N+1 | ...
 device            N ................. N+1 .............. N+2 ...
```

In the plan of step N+1, a sequence of step N has a placeholder for the token that step N draws: `UNKNOWN`, which the
data plane replaces by the token on the device. The placeholders, and the tokens that the step in flight computes, are
in the sequences only while a plan is made; if all running sequences decode, not even then, since the items of such a
plan follow from the previous ones (`DecodeRun`). Between two calls the sequences are the same as without asynchronous
scheduling, so `Scheduler` applies results, and ends, forks and aborts sequences, as usual. Only the slots of its tokens
remain of a plan made ahead. If a sequence's last token was in the step before, they are freed with its blocks: the
memory manager publishes only tokens that `update_from_results` counts as computed.

A sequence is left out of the plan made ahead, and is in the next one, if

- its next token needs the host: a grammar, a custom strategy, parameters that no device draws with
  (`SamplingParams.needs_host`), several samples of one row, beams;
- it is known to end with the step in flight, because of its length;
- the step in flight ends at a snapshot of its states, which the step after it would overwrite.

If more sequences wait for the host than are in the plan, no plan is made ahead: two halves that take turns would need
twice as many steps. If the device draws the tokens of all (also with grammars and custom strategies), one waiting
sequence for fewer than `MOST_GOING` others is enough: the step in flight is read, and the next one launched at once,
with all.

Drafts follow tokens, so a step with drafts is read before the next one is planned, and so is a step after which a
sequence may have drafts. A sequence whose drafts do not pay rests for a known number of tokens after a wrong one
(`AdaptiveDrafter`): while all rest, plans are made ahead. Sequences whose rests are over go on without drafts until
drafts are tried for all of them in one step (`DRAFT_INTERVAL`). Plans made ahead have no drafts. A draft model, or an
MTP head, reads the tokens of each step before it makes drafts, and does not read tokens of a step in flight: with it no
plan is made ahead.

In all these cases the step in flight is read before the next one is planned. The next one is launched before the
outputs of the read tokens are made, if none of its rows makes the host wait (`PlansAhead.draws_on_device`):

```
 host     read N | plan N+1 | outputs of N | read N+1 | plan N+2 | ...
 device            ....       N+1 ....................             N+2 ...
```

A plan made ahead preempts no sequence, since tokens that are not read cannot be computed again. If memory is short, or
a waiting sequence has a higher priority, the step in flight is read first, and `plan` decides as usual. So the first
sequence in order waits for one step at most.

Steps run in the order of their plans, on one stream of the device. So blocks may be allocated again while a step in
flight still writes to them: their new owners use them in later steps only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from operator import sub
from typing import Final, NamedTuple

from quire.memory.manager import KVCacheManager
from quire.scheduling.admission import Admission
from quire.scheduling.beam_groups import append_to_group
from quire.scheduling.decode_columns import DecodeItems
from quire.scheduling.drafts import DraftSlots
from quire.scheduling.plan import ScheduledSequence, StepPlan
from quire.scheduling.queues import Queues
from quire.sequences.decoding.drafting import UNKNOWN
from quire.sequences.decoding.speculation import FIRST_PAUSE, AdaptiveDrafter
from quire.sequences.decoding.stop import end_of_tokens
from quire.sequences.sequence import Request, Sequence

# No plan is made ahead if it would have fewer sequences than this for each one that waits for the host. Reading a step
# before planning the next one costs 2 to 6 % of a step if outputs are made after the launch; a sequence that is only in
# every second step gets half its tokens.
MOST_GOING: Final = 16
# Interval, in plans, at which all sequences whose drafts do not pay try drafts together, because nothing is planned
# ahead while one of them tries a draft. It is not longer than a first rest.
DRAFT_INTERVAL: Final = FIRST_PAUSE


class DecodeRun(NamedTuple):
    """Running sequences that all decode: their next plans are made without a check of each sequence.

    Args:
        items: items of the last plan.
        sequences: all running sequences, in order.
        num_steps: number of further plans, at least 1, that can be made ahead until a sequence ends by its length,
            or may have drafts.
    """

    items: DecodeItems
    sequences: list[Sequence]
    num_steps: int


class SplitStep(NamedTuple):
    """The sequences of a step in flight that have not ended, for the next plan.

    Args:
        going: sequences that are in the next plan.
        counts: number of tokens of each of them in the step.
        drawn: token lists of the sequences in `going` for which the step draws a token.
        held: sequences that are left out.
        num_waiting: number of sequences in `held` that wait for the host.
    """

    going: list[Sequence]
    counts: list[int]
    drawn: list[list[int]]
    held: list[Sequence]
    num_waiting: int


class PlansAhead:
    """Plans one step ahead of results, as a part of a scheduler.

    Args:
        memory, queues, drafts, admission: parts of the scheduler.
        sequences: the scheduler's unfinished sequences, by id.
        plan_step: plans a step of the sequences that get slots without a preemption; returns None if none does.

    Attributes:
        is_planning: True while a plan is made ahead, with placeholders.
        is_short: True once memory was short for a plan made ahead, until the next plan that may preempt.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        queues: Queues,
        sequences: Mapping[int, Sequence],
        drafts: DraftSlots,
        admission: Admission,
        plan_step: Callable[[int], StepPlan | None],
    ) -> None:
        self._memory, self._queues, self._sequences = memory, queues, sequences
        self._drafts, self._admission, self._plan_step = drafts, admission, plan_step
        self.is_planning = self.is_short = False
        self._run: DecodeRun | None = None
        # Number of the last plan that was not made ahead.
        self._last_tick = 0

    def add(self, request: Request) -> None:
        """Set the numbers of tokens from which a request is planned ahead, and drawn by a device without the host."""
        params = request.params
        if request.pooling is not None or params.needs_host:
            return
        # While end tokens are suppressed, the host draws.
        drawn_from = request.num_prompt + params.min_tokens
        # A strategy may append another token than the one drawn, or none.
        if not params.is_constrained and params.strategy is None:
            request.ahead_from = drawn_from
        # The host also draws several samples of one row, and measures prompts; penalties count drafts one by one.
        if params.prompt_logprobs is None and not (params.penalizes_tokens and self._drafts.drafter is not None):
            request.drawn_from = max(drawn_from, request.num_prompt + (params.num_sequences > 1))

    @property
    def draws_on_device(self) -> bool:
        """True if the device draws the next token of each running sequence without the host."""
        return all(len(sequence.tokens) >= sequence.request.drawn_from for sequence in self._queues.running)

    def begin(self, tick: int) -> None:
        """Begin a plan that is not made ahead."""
        self.is_short, self._last_tick = False, tick

    def append(self, group: list[Sequence], count: int) -> int:
        """Append slots to each sequence of a group without a preemption; once blocks were lacking, append none."""
        if not count or self.is_short:
            return 0
        self.is_short = not append_to_group(self._memory, group, count)
        return 0 if self.is_short else count

    def plan(self, tick: int, in_flight: StepPlan) -> StepPlan | None:
        """Return the plan of the step after the one in flight; see `Scheduler.plan_ahead`."""
        admission = self._admission
        if self.is_short or (admission.has_priorities and admission.outranks_running):
            return None
        run, self._run = self._run, None
        if run is not None and (run.items is not in_flight.items or not self._is_all(run.sequences)):
            run = None
        if self._drafts.drafter is not None and self._may_draft(tick, in_flight, knows_rests=run is not None):
            return None
        if run is not None:
            starts = [start + 1 for start in run.items.starts]
            return self._plan_decodes(tick, run.sequences, run.items.seq_ids, starts, run.num_steps - 1)
        is_pending = self._memory.is_snapshot_pending if self._memory.tables.recurrent_groups else None
        if isinstance(in_flight.items, DecodeItems) and is_pending is None:
            parts = self._split_decodes(in_flight.items)
        else:
            parts = self._split(in_flight.items, is_pending)
        going, counts, drawn, held, num_waiting = parts
        if num_waiting and num_waiting * (MOST_GOING if self.draws_on_device else 1) > len(going):
            return None
        self._queues.held = held
        if held:
            left_out = set(held)
            self._queues.running[:] = [sequence for sequence in self._queues.running if sequence not in left_out]
        try:
            if going and len(drawn) == len(going) == sum(counts) and self._is_all(going):
                starts = list(map(len, drawn))
                # A sequence that lacks two tokens gets one from the step in flight, and the other from this plan.
                most = min(map(sub, [sequence.max_tokens for sequence in going], starts)) - 2
                if self._drafts.drafter is not None:
                    rests = min(map(sub, map(self._drafts_from, going), starts)) - 2
                    most = int(max(min(most, max(rests, self._last_tick + DRAFT_INTERVAL - 1 - tick)), 0))
                seq_ids = [sequence.seq_id for sequence in going]
                return self._plan_decodes(tick, going, seq_ids, starts, 0 if is_pending else most)
            return self._plan_with_placeholders(tick, going, counts, drawn)
        finally:
            self._queues.release_held()

    def _may_draft(self, tick: int, in_flight: StepPlan, *, knows_rests: bool) -> bool:
        """Return whether the step in flight has drafts, or the next one may have: drafts follow tokens not read yet."""
        drafter, items = self._drafts.drafter, in_flight.items
        if not isinstance(drafter, AdaptiveDrafter) or drafter.is_model:
            return True
        if drafter.is_measuring and all(len(item.token_ids) == 1 for item in items):
            return True  # the time of such a step is measured without overlap
        if knows_rests:
            return False
        if any(item.num_draft for item in items):
            return True
        found = [self._sequences.get(item.seq_id) for item in items if item.num_samples]
        drawing = [sequence for sequence in found if sequence is not None]
        # A sequence that then lacks a single token gets no draft.
        awake = [
            sequence
            for sequence in drawing
            if self._drafts_from(sequence) <= len(sequence.tokens) + 1 < sequence.max_tokens - 1
        ]
        return bool(awake) and (tick >= self._last_tick + DRAFT_INTERVAL or not all(map(drafter.is_probing, awake)))

    def _drafts_from(self, sequence: Sequence) -> float:
        """Return the number of tokens from which on a sequence may have drafts."""
        drafter, request = self._drafts.drafter, sequence.request
        assert isinstance(drafter, AdaptiveDrafter)
        has_drafts = request.params.strategy is None and request.search is None
        return drafter.resumes_at(sequence) if has_drafts else inf

    def _split(self, items: Iterable[ScheduledSequence], is_pending: Callable[[int], bool] | None) -> SplitStep:
        """Divide the sequences of the step in flight: those in the next plan, and those left out."""
        split = SplitStep([], [], [], [], 0)
        num_waiting = 0
        for item in items:
            sequence = self._sequences.get(item.seq_id)
            if sequence is None:
                continue
            tokens, num_samples, ends, waits = sequence.tokens, item.num_samples, False, False
            if num_samples:
                ends = end_of_tokens(sequence, UNKNOWN) is not None
                waits = not ends and (num_samples > 1 or len(tokens) < sequence.request.ahead_from)
                num_waiting += waits
            if ends or waits or (is_pending is not None and is_pending(item.seq_id)):
                split.held.append(sequence)
                continue
            split.going.append(sequence)
            split.counts.append(len(item.token_ids))
            if num_samples:
                split.drawn.append(tokens)
        return split._replace(num_waiting=num_waiting)

    def _split_decodes(self, items: DecodeItems) -> SplitStep:
        """Divide the sequences of a step of decodes, as `_split` does: none of them waits for the host."""
        sequences = [sequence for sequence in map(self._sequences.get, items.seq_ids) if sequence is not None]
        going = [sequence for sequence in sequences if end_of_tokens(sequence, UNKNOWN) is None]
        held = []
        if len(going) < len(sequences):
            held = [sequence for sequence in sequences if end_of_tokens(sequence, UNKNOWN) is not None]
        return SplitStep(going, [1] * len(going), [sequence.tokens for sequence in going], held, 0)

    def _is_all(self, sequences: list[Sequence]) -> bool:
        """Return whether these are all running sequences, in order, and no other sequence could be in a plan."""
        return sequences == self._queues.running and not (self._queues.waiting or self._queues.swapped)

    def _plan_with_placeholders(
        self, tick: int, going: list[Sequence], counts: list[int], drawn: list[list[int]]
    ) -> StepPlan | None:
        """Plan a step as if the step in flight had ended."""
        for sequence, count in zip(going, counts, strict=True):
            sequence.num_computed += count
        for tokens in drawn:
            tokens.append(UNKNOWN)
        self.is_planning = True
        try:
            return self._plan_step(tick)
        finally:
            self.is_planning = False
            for sequence, count in zip(going, counts, strict=True):
                sequence.num_computed -= count
            for tokens in drawn:
                tokens.pop()

    def _plan_decodes(
        self, tick: int, going: list[Sequence], seq_ids: list[int], starts: list[int], num_steps: int
    ) -> StepPlan | None:
        """Plan a step of all running sequences, if the step in flight draws the next token of each.

        The plan is the same as from `_plan_with_placeholders`, in fewer loops.
        """
        num_served = self._memory.append_slots(seq_ids)
        self.is_short = num_served < len(going)
        if not num_served:
            return None
        if self.is_short:
            seq_ids, starts = seq_ids[:num_served], starts[:num_served]
        items = DecodeItems(seq_ids, starts, self._memory.take_table_deltas(seq_ids))
        if num_steps and not self.is_short:
            self._run = DecodeRun(items, going, num_steps)
        finished_ids, self._queues.finished_ids[:] = tuple(self._queues.finished_ids), ()
        return StepPlan(tick, items, self._memory.take_ops(), finished_ids)
