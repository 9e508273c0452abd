"""A simulated replica: the real scheduler and the real memory, in steps whose results are lengths and times only.

```
 real step   plan ------------- seconds of the model ------------> results, then the next plan
 leap        |  .  |  .  |  .  |  .  |  .  |  .  |  .  |  .  |     decoding steps in which nothing is decided
```

While all running sequences decode, none ends and no block is missing, a step decides nothing. Such steps are taken in
one leap: the sequences get the slots and the tokens of all steps at once. The times are added up step by step, as the
real steps would, so that a simulation without leaps gives the same results, bit for bit.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from quire.errors import PromptTooLong
from quire.memory.manager import KVCacheManager
from quire.memory.prefix.token_chain import Namespace
from quire.memory.recording.settings import MemorySettings
from quire.memory.results import MemoryOps, Tier
from quire.scheduling.plan import ItemResult, StepPlan
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request
from quire.simulation.live_request import Leap, LiveRequest
from quire.simulation.request import SimulatedRequest
from quire.simulation.samples import SimulationSamples
from quire.simulation.step_parts import parts_of
from quire.simulation.step_time import StepItem, StepTimeModel, shared_tokens
from quire.simulation.tokens import TokenSpan, TokenTable

# A shorter leap costs more than its steps.
MIN_LEAP_STEPS = 2
# Prompt tokens of the step by which the rate of prefilling is told to the scheduler.
RATE_TOKENS = 512
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
NAMESPACE = Namespace()
_BOTH_TIERS = {Tier.DEVICE, Tier.HOST}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """The options of a replica; see `MemorySettings` and `Scheduler`.

    Args:
        memory: settings of the memory manager.
        copy_bytes_per_s: rate of copies between the device and the host.
    """

    memory: MemorySettings
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    priority_aging: int = 256
    preemption_policy: str = "last"
    preemption_mode: str = "auto"
    copy_bytes_per_s: float = 20e9


class EngineReplica:
    """One engine of a simulation.

    Args:
        settings: options of the engine.
        step_time: model of the seconds of a step.
        samples: collector of the measurements.
        table: maker of token ids.
        can_leap: False to take every step by itself.

    Attributes:
        end_s: end of the step, or of the leap, in progress; None while the replica is idle.
        version: number of times that `end_s` was set; an event of an earlier version is void.
        is_followed: True where the events of the memory are taken after each step: then a leap fills no block before
            its last step, and takes none.
        num_unfinished: number of unfinished requests.
        num_steps: number of steps begun, those of leaps included.
        busy_s: seconds in steps, up to the last moment at which the replica became idle.
    """

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
        # Withdrawn blocks are remembered for the reasons of later misses, which nobody reads here.
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
        # Windows give blocks back while a sequence decodes, which a leap would do later.
        groups = self.memory.groups
        is_plain = len(groups) == 1 and not (self.memory.windowed_groups or groups[0].is_recurrent)
        self._can_leap = can_leap and is_plain and step_time.is_additive
        self._jobs: dict[int, LiveRequest] = {}
        self._num_requests = 0
        self._plan: StepPlan | None = None
        self._leap: Leap | None = None
        # True where another plan would admit nobody either, until a request comes or ends.
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
        """Queue a request; return whether the replica can ever hold it.

        Args:
            request: the request.
            now_s: present moment.
            num_new: number of new tokens to make here; None for all of them.
            num_cached: number of prompt tokens that count as found in a prefix cache; None for those found here.
        """
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
        # The sequence has a copy of the tokens; of the request's own only their number is read from now on.
        queued.prompt_token_ids = range(num_prompt)  # type: ignore[assignment]
        self._jobs[sequence.seq_id] = LiveRequest(request, sequence, num_prompt, num_new, num_cached)
        self.num_unfinished += 1
        self._is_decided = False
        if self.end_s is None:
            self._busy_since_s = now_s
            self._begin(now_s)
        return True

    def hit_tokens(self, request: SimulatedRequest, now_s: float) -> int:
        """Return how many tokens of a request's prompt the memory would reuse now."""
        self.settle(now_s)
        chain = self.memory.chain(self._table.token_ids(request.prompt), NAMESPACE)
        return self.memory.match_prefix(chain).num_tokens

    def settle(self, now_s: float) -> None:
        """Bring a leap to the present: its ended steps are taken, and the step in progress is one by itself."""
        if self._leap is not None:
            start_s, ends_s = self._leap
            num_ended = bisect_left(ends_s, now_s)
            self._take_steps(num_ended)
            self._begin_step(ends_s[num_ended - 1] if num_ended else start_s)

    def end_step(self) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
        """End the step or the leap in progress, and begin the next one; see `take_results`."""
        results = self.take_results()
        self.begin_next()
        return results

    def take_results(self) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
        """End the step or the leap in progress; `begin_next` must follow at the same moment.

        Returns:
            The requests that got their first token, and those that ended.
        """
        assert self.end_s is not None, "no step is in progress"
        if self._leap is None:
            return self._take_results(self.end_s)
        self._take_steps(len(self._leap.ends_s))
        return [], []

    def begin_next(self) -> None:
        """Begin the next step or leap where one has ended."""
        assert self.end_s is not None, "no step has ended"
        self._begin(self.end_s)

    # ---- a step ----

    def _begin(self, now_s: float) -> None:
        """Begin a leap or a step; without unfinished requests the replica is idle."""
        if not self._jobs:
            self.busy_s += now_s - self._busy_since_s
            self._set_end(None)
            return
        num_steps = self._leap_length(now_s) if self._can_leap else 0
        if num_steps < MIN_LEAP_STEPS:
            self._begin_step(now_s)
            return
        running = self.scheduler.running
        num_cached = sum([sequence.num_computed for sequence in running])
        states = self.memory.sequences
        tables = [(states[sequence.seq_id].tables[0], sequence.num_computed) for sequence in running]
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
        # A step with a preemption admits nobody, and the next one may.
        is_calm = scheduler.stats.num_preemptions == num_preemptions
        self._is_decided = is_decoding and is_calm and len(parts) == len(scheduler.running)
        self._set_end(now_s + seconds)

    def _copy_s(self, ops: MemoryOps) -> float:
        """Return the seconds of copies between the device and the host; others are counted as nothing."""
        groups = self.memory.groups
        moved = [copy.group_idx for copy in ops.copies if {copy.src_tier, copy.dst_tier} == _BOTH_TIERS]
        num_bytes = sum(groups[idx].spec.bytes_per_block for idx in moved)
        return num_bytes / self._settings.copy_bytes_per_s

    def _take_results(self, now_s: float) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
        """Give each sequence of the plan its token, and return the requests that begin to answer, and that end."""
        plan, jobs, table = self._plan, self._jobs, self._table
        assert plan is not None, "no step is in progress"
        self._plan = None
        results, sampled = [], []
        for item in plan.items:
            token_ids: tuple[int, ...] = ()
            if item.num_samples:
                job = jobs[item.seq_id]
                position = job.num_new - job.num_remaining
                token_ids = (table.token_at(job.request.output_stream, position),)
                sampled.append(job)
            results.append(ItemResult(item.seq_id, token_ids))
        self.scheduler.update_from_results(plan.items, results)
        started, ended = [], []
        for job in sampled:
            job.num_remaining -= 1
            if job.first_s < 0:
                job.first_s = now_s
                started.append(job.request)
            else:
                self._samples.add_gap(now_s - job.last_s)
            job.last_s = now_s
            if not job.num_remaining:
                ended.append(self._end(job))
        return started, ended

    def _end(self, job: LiveRequest) -> SimulatedRequest:
        """Record a request that has ended."""
        request, sequence = job.request, job.sequence
        del self._jobs[sequence.seq_id]
        # A request and its sequences name each other: without this, they and their tokens would stay until the cyclic
        # garbage collector comes, which takes as much memory as all that is alive.
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
        """Let a leap end with the step in progress, which was planned before what has just happened."""
        if self._leap is not None:
            ends_s = self._leap.ends_s
            num_steps = bisect_left(ends_s, now_s) + 1
            if num_steps < len(ends_s):
                del ends_s[num_steps:]
                self._set_end(ends_s[-1])

    def _leap_length(self, now_s: float) -> int:
        """Return the number of next steps in which nothing is decided.

        Every running sequence decodes and got a token just now, none of them ends, none of the others can be admitted,
        and no block is missing. A waiting sequence that was not admitted in the last step has less room in these, as
        long as no running one ends. One of a higher priority may preempt as soon as others have grown, however.
        """
        scheduler, jobs = self.scheduler, self._jobs
        running = scheduler.running
        if not running or scheduler.swapped:
            return 0
        if scheduler.waiting and not (self._is_decided and self._settings.policy == "fcfs"):
            return 0
        num_steps, size, states = 1 << 62, self.memory.block_size, self.memory.sequences
        for sequence in running:
            job = jobs[sequence.seq_id]
            if job.last_s != now_s or sequence.num_pending != 1:
                return 0
            num_steps = min(num_steps, job.num_remaining - 1)
            if self.is_followed:
                num_steps = min(num_steps, -states[sequence.seq_id].num_slots % size)
        return self._num_steps_with_room(num_steps)

    def _num_steps_with_room(self, most: int) -> int:
        """Return the number of steps, at most `most`, for which there are blocks without preemption."""
        size, states = self.memory.block_size, self.memory.sequences
        filled = [states[sequence.seq_id].num_slots for sequence in self.scheduler.running]
        pool = self.memory.groups[0].pool
        # An eviction to the host is a copy, which takes time in its own step.
        room = len(pool.free) if self.memory.host is not None else len(pool.ref_counts) - 1 - pool.num_used

        def num_blocks(count: int) -> int:
            return sum([(slots + count - 1) // size - (slots - 1) // size for slots in filled])

        if most < MIN_LEAP_STEPS or num_blocks(most) <= room:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if num_blocks(middle) <= room else (low, middle)
        return low

    def _take_steps(self, count: int) -> None:
        """Take the first steps of the leap in progress, which ends."""
        leap, self._leap = self._leap, None
        assert leap is not None, "no leap is in progress"
        if not count:
            return
        memory, jobs, running = self.memory, self._jobs, self.scheduler.running
        last_s = leap.ends_s[count - 1]
        self._samples.add_gaps(leap.start_s, leap.ends_s[:count], len(running))
        computed = {}
        memory.append_slots([sequence.seq_id for sequence in running], count)
        for sequence in running:
            seq_id = sequence.seq_id
            job = jobs[seq_id]
            position = job.num_new - job.num_remaining
            span = TokenSpan(job.request.output_stream, position, position + count)
            sequence.tokens += self._table.token_ids((span,))
            sequence.num_computed += count
            computed[seq_id] = sequence.num_computed
            job.num_remaining -= count
            job.last_s = last_s
        memory.publish_each(computed)
        memory.take_table_deltas(computed)
        memory.take_ops()
        self.num_steps += count
