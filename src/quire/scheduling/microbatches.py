"""Microbatches: plans of different requests that are in the stages of a pipeline at the same time.

```
 stage 0    A   B   A'  B'  ...        A' is planned when the results of A have arrived
 stage 1        A   B   A'  B' ...
```

Every rank executes plans in the order in which they were made, so a later plan's block operations happen after an
earlier one's; only the earlier plan's results may be missing. A request with a sequence in a plan without results is
*in flight*: it is in no other plan, keeps its memory, and counts for the limits.

The running requests are divided evenly: a plan takes at most an equal share of the sequences. It skips requests in
flight, and otherwise follows the order of the policy. With one microbatch, plans are the same as without a
pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from quire.memory.results import NO_OPS, MemoryOps
from quire.scheduling.admission import Admission
from quire.scheduling.beam_groups import slots_needed
from quire.scheduling.plan import StepPlan
from quire.scheduling.queues import Queues
from quire.sequences.sequence import Request, Sequence


class Microbatches:
    """The plans in flight of a scheduler that plans ahead of results, for a pipeline of stages.

    Args:
        num_microbatches: number of plans that may be in flight.
        max_num_seqs: see `Scheduler`.
        queues, admission: parts of the scheduler.
        sequences: the scheduler's unfinished sequences, by id.
        plan_step: plans a step of all sequences that are not held.

    Attributes:
        new_plans: plans that the last call of `plan` has made, in the order in which all ranks execute them.
    """

    def __init__(
        self,
        num_microbatches: int,
        max_num_seqs: int,
        queues: Queues,
        sequences: Mapping[int, Sequence],
        admission: Admission,
        plan_step: Callable[[int], StepPlan],
    ) -> None:
        self.new_plans: list[StepPlan] = []
        self._num_microbatches, self._max_num_seqs = num_microbatches, max_num_seqs
        self._queues, self._sequences = queues, sequences
        self._admission, self._plan_step = admission, plan_step
        self._in_flight: deque[StepPlan] = deque()
        self._num_planned = 0

    def plan(self, tick: int) -> StepPlan:
        """Fill the pipeline; return the oldest plan in flight, whose results are to be applied before the next call.

        Some of its sequences may have ended since it was made.
        """
        self.new_plans = []
        while len(self._in_flight) < self._num_microbatches:
            plan = self._plan_next()
            if not plan.items:
                break
            self._num_planned += 1
            self._in_flight.append(plan)
            self.new_plans.append(plan)
        if not self._in_flight:
            return StepPlan(tick, (), NO_OPS, ())
        return self._in_flight.popleft()._replace(tick=tick)

    def take_ops(self) -> list[MemoryOps]:
        """Return the ops of the plans in flight, whose items are dropped."""
        ops = [plan.ops for plan in self._in_flight]
        self._in_flight.clear()
        return ops

    def _plan_next(self) -> StepPlan:
        """Plan a microbatch of requests that are not in flight; it may be empty while other plans are in flight."""
        in_flight = self._requests_in_flight()
        if self._num_microbatches > 1:
            # Waiting sequences may not fit, so the running ones are divided by their own number.
            running = self._share(self._queues.running)
            sequences = chain(self._queues.running, self._queues.swapped, self._queues.waiting)
            plan = self._plan_within(in_flight, running, self._share(sequences))
            if plan.items or self._in_flight:
                return plan
        # With no plan in flight, the first sequence in order always advances: it may preempt all others.
        return self._plan_within(in_flight, self._max_num_seqs, self._max_num_seqs)

    def _plan_within(self, in_flight: set[Request], num_running: int, num_admitted: int) -> StepPlan:
        """Plan a step of requests that are not in flight; at least one whole request."""
        queues, running = self._queues, self._queues.running
        free = [sequence for sequence in running if sequence.request not in in_flight]
        end = _end_of_requests(free, num_running)
        held = [sequence for sequence in running if sequence.request in in_flight] + free[end:]
        one_more = sum(map(slots_needed, free)) + self._slots_of_first()
        self._admission.limit = 0 if free[end:] else max(num_admitted, one_more)
        running[:] = free[:end]
        queues.held = held
        try:
            return self._plan_step(self._num_planned)
        finally:
            queues.release_held()

    def _slots_of_first(self) -> int:
        """Return the slots that the first waiting or swapped sequence needs, with its swapped siblings."""
        first = self._queues.first_not_running()
        if first is None:
            return 0
        siblings = [sequence for sequence in self._queues.swapped if sequence.request is first.request]
        return sum(map(slots_needed, siblings)) or slots_needed(first)

    def _requests_in_flight(self) -> set[Request]:
        """Return the requests that have sequences in plans in flight."""
        seq_ids = (item.seq_id for plan in self._in_flight for item in plan.items)
        return {self._sequences[seq_id].request for seq_id in seq_ids if seq_id in self._sequences}

    def _share(self, sequences: Iterable[Sequence]) -> int:
        """Return a microbatch's equal share of sequences, at least 1, counted in `max_num_seqs` slots."""
        count = 0
        for sequence in sequences:
            count += slots_needed(sequence)
            if count >= self._max_num_seqs:  # the queue may be long
                count = self._max_num_seqs
                break
        return max(1, -(-count // self._num_microbatches))


def _end_of_requests(sequences: list[Sequence], limit: int) -> int:
    """Return the greatest number of leading sequences, at most `limit`, of whole requests; at least one request."""
    end = 0
    for idx, sequence in enumerate(sequences, 1):
        if idx == len(sequences) or sequences[idx].request is not sequence.request:
            if idx > limit and end:
                break
            end = idx
    return end
