"""A simulated replica: the real scheduler and memory manager, with steps that have only lengths and times.

```
 real step   plan ------------- seconds of the model ------------> results, then the next plan
 leap        |  .  |  .  |  .  |  .  |  .  |  .  |  .  |  .  |     decoding steps in which nothing is decided
```

While all running sequences decode and no block is missing, steps need no scheduling decision, up to and including the
first step that ends a sequence. Such steps are simulated in one leap: the sequences get the slots and tokens of all
steps at once. Times are added step by step, so that a simulation without leaps gives the same results, bit for bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from quire.errors import PromptTooLong
from quire.measurement.simulation.replicas.replica_settings import ReplicaSettings
from quire.measurement.simulation.replicas.step_parts import parts_of
from quire.measurement.simulation.replicas.step_time import StepItem, StepTimeModel, shared_tokens
from quire.measurement.simulation.replicas.tokens import TokenTable
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.samples import SimulationSamples
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.token_chain import Namespace
from quire.memory.results import MemoryOps, Tier
from quire.scheduling.plan import ItemResult, ScheduledSequence, StepPlan
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request, Sequence

# Prompt tokens of the step from which the scheduler's rate of prefilling is computed.
RATE_TOKENS = 512
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
NAMESPACE = Namespace()
_BOTH_TIERS = {Tier.DEVICE, Tier.HOST}
# The fields of a result except its sequence and tokens.
_NO_MORE = ItemResult(0, ())[2:]


class LiveRequest:
    """An unfinished request of a replica."""

    __slots__ = (
        "first_s",
        "last_s",
        "num_cached",
        "num_new",
        "num_prompt",
        "num_remaining",
        "request",
        "sequence",
    )

    def __init__(
        self, request: SimulatedRequest, sequence: Sequence, num_prompt: int, num_new: int, num_cached: int | None
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.num_prompt = num_prompt
        self.num_new = self.num_remaining = num_new
        self.num_cached = num_cached
        self.first_s = self.last_s = -1.0


class Leap(NamedTuple):
    """Decoding steps that are simulated together: the start of the first one, and the end of each."""

    start_s: float
    ends_s: list[float]


def num_steps_with_room(memory: KVCacheManager, running: Seq[Sequence], most: int) -> int:
    """Return the number of steps, at most `most`, for which all running sequences get slots without preemption."""
    size, states = memory.block_size, memory.sequences
    filled = [states[sequence.seq_id].num_slots for sequence in running]
    pool = memory.groups[0].pool
    # An eviction to the host is a copy, which takes time in its step, so with a host tier only free blocks count.
    room = len(pool.free) if memory.host is not None else len(pool.ref_counts) - 1 - pool.num_used

    def num_blocks(count: int) -> int:
        return sum([(slots + count - 1) // size - (slots - 1) // size for slots in filled])

    # A quick test: a sequence takes at most one block more than its new tokens fill.
    if len(filled) * (1 + most // size) <= room or num_blocks(most) <= room:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if num_blocks(middle) <= room else (low, middle)
    return low


class EngineReplica:
    """One engine of a simulation."""

    __slots__ = (
        "_busy_since_s",
        "_can_leap",
        "_is_decided",
        "_jobs",
        "_leap",
        "_num_requests",
        "_plan",
        "_samples",
        "_settings",
        "_step_time",
        "_table",
        "busy_s",
        "end_s",
        "is_followed",
        "memory",
        "num_steps",
        "num_unfinished",
        "scheduler",
        "version",
    )

    def __init__(
        self,
        settings: ReplicaSettings,
        step_time: StepTimeModel,
        samples: SimulationSamples,
        table: TokenTable,
        *,
        can_leap: bool = True,
    ) -> None:
        self.memory: KVCacheManager = settings.memory.build()
        # Tombstones record the reasons of later misses, which are not used here.
        self.memory.tree.max_tombstones = 0
        self.scheduler = Scheduler(
            self.memory,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            policy=settings.policy,
            priority_aging=settings.priority_aging,
            preemption_policy=settings.preemption_policy,
            preemption_mode=settings.preemption_mode,
        )
        prefill_s = step_time.of_step([StepItem(0, RATE_TOKENS, 1)])
        self.scheduler.preemption.rates = replace(
            self.scheduler.preemption.rates,
            copy_bytes_per_s=settings.copy_bytes_per_s,
            prefill_tokens_per_s=RATE_TOKENS / prefill_s,
        )
        self._settings = settings
        self._step_time = step_time
        self._samples = samples
        self._table = table
        # With windows, blocks are freed while a sequence decodes; a leap would free them too late.
        groups = self.memory.groups
        is_plain = len(groups) == 1 and not (self.memory.windowed_groups or groups[0].is_recurrent)
        self._can_leap = can_leap and is_plain and step_time.is_additive
        self._jobs: dict[int, LiveRequest] = {}
        self._num_requests = 0
        self._plan: StepPlan | None = None
        self._leap: Leap | None = None
        # True if another plan would admit no request either, until a request arrives or ends.
        self._is_decided = False
        self.end_s: float | None = None
        self.version = 0
        self.is_followed = False
        self.num_unfinished = 0
        self.num_steps = 0
        self.busy_s = self._busy_since_s = 0.0

    def submit(
        self, request: SimulatedRequest, now_s: float, num_new: int | None = None, num_cached: int | None = None
    ) -> bool:
        """Queue a request; return False if the replica can never hold it."""
        self._cut_leap(now_s)
        num_new = request.num_new if num_new is None else num_new
        prompt = self._table.token_ids(request.prompt)
        num_prompt = len(prompt)
        name = str(self._num_requests)
        queued = Request(
            name,
            prompt,
            _GREEDY,
            num_prompt + num_new,
            frozenset(),
            arrival=self._num_requests,
            seed=0,
            priority=request.priority,
            namespace=NAMESPACE,
        )
        self._num_requests += 1
        try:
            self.scheduler.add(queued)
        except PromptTooLong:
            self._samples.num_rejected += 1
            return False
        sequence = queued.sequences[0]
        # The sequence has a copy of the tokens; only the number of the request's tokens is read from now on.
        queued.prompt_token_ids = range(num_prompt)  # type: ignore[assignment]
        self._jobs[sequence.seq_id] = LiveRequest(request, sequence, num_prompt, num_new, num_cached)
        self.num_unfinished += 1
        self._is_decided = False
        if self.end_s is None:
            self._busy_since_s = now_s
            self._begin(now_s)
        return True

    def hit_tokens(self, request: SimulatedRequest, now_s: float) -> int:
        """Return the number of tokens of a request's prompt that would be reused now."""
        self.settle(now_s)
        chain = self.memory.chain(self._table.token_ids(request.prompt), NAMESPACE)
        return self.memory.match_prefix(chain).num_tokens

    def settle(self, now_s: float) -> None:
        """Bring a leap to the present: apply its ended steps, and plan the step in progress as a single step."""
        if self._leap is not None:
            start_s, ends_s = self._leap
            # The last step, which may end requests, is never among them: it ends by a separate event.
            num_ended = bisect_left(ends_s, now_s)
            self._take_steps(num_ended)
            self._begin_step(ends_s[num_ended - 1] if num_ended else start_s)

    def end_step(self) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
        """End the step or leap in progress, and begin the next one; see `take_results`."""
        results = self.take_results()
        self.begin_next()
        return results

    def take_results(self) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
        """End the step or leap in progress, and return the requests whose answers began, and the requests that ended.

        `begin_next` must follow at the same time.
        """
        assert self.end_s is not None, "no step is in progress"
        if self._leap is None:
            return self._take_results(self.end_s)
        return [], self._take_steps(len(self._leap.ends_s))

    def begin_next(self) -> None:
        """Begin the next step or leap at the end of the last one."""
        assert self.end_s is not None, "no step has ended"
        self._begin(self.end_s)

    # ---- a step ----

    def _begin(self, now_s: float) -> None:
        """Begin a leap or a step; without unfinished requests, become idle."""
        if not self._jobs:
            self.busy_s += now_s - self._busy_since_s
            self._set_end(None)
            return
        num_steps = self._leap_length(now_s) if self._can_leap else 0
        if not num_steps:
            self._begin_step(now_s)
            return
        running = self.scheduler.running
        states = self.memory.sequences
        tables = [(states[sequence.seq_id].tables[0], sequence.num_computed) for sequence in running]
        num_cached = sum([num_computed for _, num_computed in tables])
        num_shared = sum(shared_tokens(tables, self.memory.block_size))
        ends_s = self._step_time.decode_ends(now_s, len(running), num_cached, num_shared, num_steps)
        self._leap = Leap(now_s, ends_s)
        self._set_end(ends_s[-1])

    def _begin_step(self, now_s: float) -> None:
        """Plan a step and begin it."""
        scheduler = self.scheduler
        num_preemptions = scheduler.stats.num_preemptions
        plan = self._plan = scheduler.plan(self.num_steps)
        self.num_steps += 1
        parts = parts_of(plan.items, self.memory)
        seconds = self._step_time.of_step(parts) + self._copy_s(plan.ops)
        is_decoding = all(part.num_pending == 1 for part in parts)
        # A step with a preemption admits no request, but the next one may.
        is_calm = scheduler.stats.num_preemptions == num_preemptions
        self._is_decided = is_decoding and is_calm and len(parts) == len(scheduler.running)
        self._set_end(now_s + seconds)

    def _copy_s(self, ops: MemoryOps) -> float:
        """Return the seconds of copies between device and host; other copies count as 0."""
        if not ops.copies:
            return 0.0
        groups = self.memory.groups
        moved = [copy.group_idx for copy in ops.copies if {copy.src_tier, copy.dst_tier} == _BOTH_TIERS]
        num_bytes = sum(groups[idx].spec.bytes_per_block for idx in moved)
        return num_bytes / self._settings.copy_bytes_per_s

    def _take_results(self, now_s: float) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
        """Return each sequence's token to the scheduler; return the requests whose answers began, and that ended."""
        plan, jobs, table = self._plan, self._jobs, self._table
        assert plan is not None, "no step is in progress"
        self._plan = None
        results, sampled = [], []
        new = tuple.__new__  # the same as the class, without a Python call
        for item in plan.items:
            token_ids: tuple[int, ...] = ()
            if item.num_samples:
                job = jobs[item.seq_id]
                position = job.num_new - job.num_remaining
                token_ids = (table.token_at(job.request.output_stream, position),)
                sampled.append(job)
            results.append(new(ItemResult, (item.seq_id, token_ids, *_NO_MORE)))
        self.scheduler.update_from_results(plan.items, results)
        started, ended = [], []
        # Nearly all sequences got their last token at the same time, so gaps are counted by this time.
        num_before: dict[float, int] = {}
        for job in sampled:
            job.num_remaining -= 1
            if job.first_s < 0:
                job.first_s = now_s
                started.append(job.request)
            else:
                num_before[job.last_s] = num_before.get(job.last_s, 0) + 1
            job.last_s = now_s
            if not job.num_remaining:
                ended.append(self._end(job))
        for before_s, count in num_before.items():
            self._samples.add_gap(now_s - before_s, count)
        return started, ended

    def _end(self, job: LiveRequest) -> SimulatedRequest:
        """Record a request that has ended."""
        request, sequence = job.request, job.sequence
        del self._jobs[sequence.seq_id]
        # A request and its sequences refer to each other: without this, they and their tokens would stay in memory,
        # since the cyclic garbage collector is disabled.
        sequence.request.sequences.clear()
        self.num_unfinished -= 1
        self._is_decided = False
        num_cached = (sequence.request.num_cached_tokens or 0) if job.num_cached is None else job.num_cached
        self._samples.add_request(request.arrival_s, job.first_s, job.last_s, job.num_new, job.num_prompt, num_cached)
        return request

    def _set_end(self, end_s: float | None) -> None:
        self.end_s = end_s
        self.version += 1

    # ---- a leap ----

    def _cut_leap(self, now_s: float) -> None:
        """End a leap with the step in progress, which was planned before the new request arrived."""
        if self._leap is not None:
            ends_s = self._leap.ends_s
            num_steps = bisect_left(ends_s, now_s) + 1
            if num_steps < len(ends_s):
                del ends_s[num_steps:]
                self._set_end(ends_s[-1])

    def _leap_length(self, now_s: float) -> int:
        """Return the number of next steps without a scheduling decision.

        In these steps, every running sequence decodes and got a token just now, none ends before the last step, no
        waiting sequence can be admitted, and no block is missing. A waiting sequence that was not admitted in the last
        step has even less room now, until a running one ends. But a sequence of a higher priority may preempt others
        when they have grown, so only the policy "fcfs" leaps with waiting sequences.
        """
        scheduler, jobs = self.scheduler, self._jobs
        running = scheduler.running
        if not running or scheduler.swapped:
            return 0
        if scheduler.waiting and not (self._is_decided and self._settings.policy == "fcfs"):
            return 0
        coming = [jobs[sequence.seq_id] for sequence in running]
        for job in coming:
            sequence = job.sequence
            if job.last_s != now_s or len(sequence.tokens) - sequence.num_computed != 1:
                return 0
        num_steps = min([job.num_remaining for job in coming])
        if self.is_followed:
            size, states = self.memory.block_size, self.memory.sequences
            num_steps = min(num_steps, *(-states[sequence.seq_id].num_slots % size for sequence in running))
        return num_steps_with_room(self.memory, running, num_steps)

    def _take_steps(self, count: int) -> list[SimulatedRequest]:
        """Apply the first steps of the leap, and end it; return the requests that end with the last of these steps."""
        leap, self._leap = self._leap, None
        assert leap is not None, "no leap is in progress"
        if not count:
            return []
        memory, jobs, running = self.memory, self._jobs, self.scheduler.running
        last_s = leap.ends_s[count - 1]
        self._samples.add_gaps(leap.start_s, leap.ends_s[:count], len(running))
        computed, ending = {}, []
        memory.append_slots([sequence.seq_id for sequence in running], count)
        ids = self._table.at_least(max([jobs[sequence.seq_id].num_new for sequence in running]))
        for sequence in running:
            seq_id = sequence.seq_id
            job = jobs[seq_id]
            # The first token came with the prompt's last step; the ids of all further tokens are their positions.
            position = job.num_new - job.num_remaining
            job.num_remaining -= count
            job.last_s = last_s
            computed[seq_id] = sequence.num_computed + count
            num_taken = count
            if not job.num_remaining:
                # The scheduler appends the last token, and ends the sequence.
                num_taken -= 1
                ending.append(job)
            sequence.tokens += ids[position : position + num_taken]
            sequence.num_computed += num_taken
        memory.publish_each(computed)
        if memory.tables.pending_copies:
            memory.take_ops()
        self.num_steps += count
        return self._finish(ending) if ending else []

    def _finish(self, jobs: list[LiveRequest]) -> list[SimulatedRequest]:
        """Return the last tokens of sequences to the scheduler, which ends them, and record their requests."""
        items, results = [], []
        for job in jobs:
            sequence = job.sequence
            items.append(ScheduledSequence(sequence.seq_id, sequence.num_computed, sequence.tokens[-1:], (), 1, None))
            token_id = self._table.token_at(job.request.output_stream, job.num_new - 1)
            results.append(ItemResult(sequence.seq_id, (token_id,)))
        self.scheduler.update_from_results(items, results)
        return [self._end(job) for job in jobs]
