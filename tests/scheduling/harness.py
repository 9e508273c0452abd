"""The real scheduler and the real memory on simulated slots, stepped by a stand-in for the engine."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.memory import FullAttention, KVCacheManager, KVCacheSpec, MediaSpan, Namespace, check
from quire.scheduling import Scheduler, StepPlan
from quire.scheduling.plan import ScheduledSequence
from quire.sequences import Request, SamplingParams, Sequence
from quire.sequences.decoding.drafting import UNKNOWN, Drafter
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.media import Media
from tests.scheduling.auditor import Auditor
from tests.scheduling.simulated_executor import SimulatedExecutor

VOCAB_SIZE = 13
END_TOKEN = 12
NEVER = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Job:
    """One client's request, and when the client aborts it.

    Args:
        abort_at: step of the abort.
        abort_while_running: the abort comes between the plan and its results.
        media_see_themselves: the rows of a medium see each other, so a step has all of them or none.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 4
    n: int = 1
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    media: tuple[MediaSpan, ...] = ()
    media_see_themselves: bool = False
    priority: int = 0
    flow: str | None = None
    arrives_at: int = 0
    abort_at: int = NEVER
    abort_while_running: bool = False

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters, without a seed."""
        return SamplingParams(
            n=self.n,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes and options of a run; by default plenty of device memory and no host tier.

    Args:
        drafts: maker of drafts: "" for none, "guesser" in the control plane, "model" in the data plane; "adaptive" for
            guesses, mostly wrong, where they pay, and "resting" where they never do.
        late_media: features of media come some steps after a sequence has asked for them, and are lost again.
        num_bytes: size of the arena, in place of `num_blocks`, for groups whose blocks differ.
    """

    num_blocks: int = 2000
    num_bytes: int | None = None
    block_size: int = 4
    budget: int = 4096
    max_num_seqs: int = 512
    watermark: int = 0
    caching: bool = True
    policy: str = "fcfs"
    priority_aging: int = 256
    preemption_policy: str = "last"
    preemption_mode: str = "auto"
    host_blocks: int = 0
    specs: tuple[KVCacheSpec, ...] = ()
    snapshot_interval: int | None = None
    retention: int = 0
    pin_limit: int = 0
    chunk_tokens: int | None = None
    drafts: str = ""
    late_media: bool = False

    @property
    def room(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def groups(self) -> tuple[KVCacheSpec, ...]:
        """Specifications of all cache groups."""
        return self.specs or (FullAttention(block_size=self.block_size),)

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """Options of a scheduler of any kind."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.budget,
            "policy": self.policy,
            "priority_aging": self.priority_aging,
            "preemption_policy": self.preemption_policy,
            "preemption_mode": self.preemption_mode,
        }

    def build_drafter(self, executor: SimulatedExecutor) -> Drafter | None:
        """Return the maker of drafts of a data plane."""
        if not self.drafts:
            return None
        guesser = Guesser(executor, leaves_them=self.drafts == "model")
        if self.drafts not in ("adaptive", "resting"):
            return guesser
        guesser.share_right = 0.3
        drafter = AdaptiveDrafter(guesser, 4)
        if self.drafts == "resting":
            drafter.step_costs = [1.0, 3.0, 5.0, 7.0, 9.0]
        return drafter

    def build_memory(self) -> KVCacheManager:
        """Return a memory manager of these sizes."""
        # The null blocks take one block of each group.
        host_bytes = (self.host_blocks + 1) * sum(spec.bytes_per_block for spec in self.groups)
        return KVCacheManager(
            self.groups,
            None if self.num_bytes else self.num_blocks,
            num_bytes=self.num_bytes,
            watermark=self.watermark,
            enable_prefix_caching=self.caching,
            host_bytes=host_bytes if self.host_blocks else 0,
            snapshot_interval=self.snapshot_interval,
            retention_limit=self.retention,
            pin_limit=self.pin_limit,
        )


class Guesser:
    """Guesses right or wrong, as a hash of the tokens so far says.

    Args:
        executor: data plane whose tokens are guessed.
        leaves_them: the drafts are placeholders, which the data plane fills.

    Attributes:
        share_right: share of the guesses that are right.
    """

    def __init__(self, executor: SimulatedExecutor, *, leaves_them: bool) -> None:
        self.executor = executor
        self.share_right = 0.8
        self.leaves_them = leaves_them
        self.counts = [0, 0]
        self.num_forgotten = 0

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Return up to four tokens, mostly those that will be drawn."""
        rng = random.Random(repr((sequence.seq_id, sequence.tokens)))
        draft: list[int] = []
        while len(draft) < min(limit, 4) and rng.random() < 0.8:
            known = self.executor.predict_next(sequence.seq_id, (*sequence.tokens[sequence.num_computed :], *draft))
            if self.leaves_them:
                draft.append(UNKNOWN)
                continue
            draft.append(known if known is not None and rng.random() < self.share_right else rng.randrange(VOCAB_SIZE))
        return tuple(draft)

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Count."""
        assert 0 <= num_accepted <= num_drafted <= len(sequence.draft)
        self.counts[0] += num_drafted
        self.counts[1] += num_accepted

    def forget(self, sequence: Sequence) -> None:
        """Note that it was told of an end."""
        assert sequence.is_finished
        self.num_forgotten += 1

    def reset(self) -> None:
        """Do nothing."""


class LateMedia:
    """A gate of media whose features come some steps after they were asked for, and are lost again.

    Attributes:
        held_back: sequences that the present plan may have no token of.
    """

    def __init__(self) -> None:
        self.held_back: set[Sequence] = set()
        self.is_closed = False
        self._rng = random.Random(0)
        self._present: set[bytes] = set()
        self._asked: dict[bytes, int] = {}

    def limits(self, running: Iterable[Sequence]) -> dict[Sequence, int]:
        """Begin a plan."""
        self.held_back.clear()
        self.is_closed = False
        with_media = [sequence for sequence in running if sequence.request.media]
        return {sequence: self.limit(sequence, sequence.num_computed) for sequence in with_media}

    def limit(self, sequence: Sequence, start: int) -> int:
        """Ask for the first medium that is lacking."""
        for span, *_ in sequence.request.media:
            if span.end <= start or span.digest in self._present:
                continue
            self._asked.setdefault(span.digest, self._rng.randrange(4))
            self.is_closed = True
            if span.start <= start:
                self.held_back.add(sequence)
            return max(0, span.start - start)
        return NEVER

    def is_ready(self, item: ScheduledSequence, sequence: Sequence) -> bool:
        """Say whether no row of an item lacks its features."""
        end = item.start + len(item.token_ids)
        spans = [span for span, *_ in sequence.request.media if span.start < end and item.start < span.end]
        return all(span.digest in self._present for span in spans)

    def end_step(self) -> None:
        """Bring features that are due, and lose some."""
        if self._rng.random() < 0.2:
            self._present.clear()
        due = {digest for digest, num_steps in self._asked.items() if not num_steps}
        self._present |= due
        self._asked = {digest: num_steps - 1 for digest, num_steps in self._asked.items() if num_steps}


@dataclass
class Outcome:
    """What a run gave: per job the tokens of each sample, or of the best hypotheses; and the parts to look into."""

    outputs: list[list[list[int]]]
    requests: list[Request]
    scheduler: Scheduler
    executor: SimulatedExecutor
    num_steps: int
    peak_blocks: int


@dataclass
class Harness:
    """An engine without text: adds, plans, executes, advances, and has everything audited.

    Args:
        setting: of scheduler and memory.
        is_audited: False leaves only the simulated slots and the outputs as nets.
    """

    setting: Setting
    is_audited: bool = True
    tick: int = 0
    peak_blocks: int = 0
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        setting = self.setting
        self.memory = setting.build_memory()
        self.media = LateMedia() if setting.late_media else None
        self.scheduler = Scheduler(self.memory, media=self.media, **setting.scheduler_options)
        self.scheduler.chunk_tokens = setting.chunk_tokens
        self.executor = SimulatedExecutor(setting.block_size, VOCAB_SIZE, setting.groups)
        self.scheduler.drafts.drafter = setting.build_drafter(self.executor)
        self.auditor = Auditor(self.scheduler, self.media.held_back if self.media else frozenset())

    def add(self, job: Job, seed: int) -> Request:
        """Queue a job."""
        request = Request(
            request_id=f"job {seed}",
            prompt_token_ids=list(job.prompt),
            params=job.params,
            max_total_tokens=len(job.prompt) + job.max_tokens,
            end_token_ids=frozenset() if job.ignore_eos else frozenset({END_TOKEN}),
            arrival=len(self.requests),
            seed=seed,
            priority=job.priority,
            flow=job.flow,
            namespace=Namespace(cache_salt=job.cache_salt),
            media=tuple(
                Media(span, None, None, job.media_see_themselves) for span in job.media if span.end <= len(job.prompt)
            ),
            retain_cache=seed % 2 == 1,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        self.audit()
        return request

    def plan(self) -> StepPlan:
        """Have a step planned, and audit it."""
        if not self.is_audited:
            return self.scheduler.plan(self.tick)
        before = self.auditor.before_plan()
        plan = self.scheduler.plan(self.tick)
        self.auditor.after_plan(before, plan)
        self.audit()
        return plan

    def finish_step(self, plan: StepPlan) -> None:
        """Execute a plan and take in its results: of all items together, or in every second step item by item.

        The invariants of the queues are checked after each of these calls. Those of memory, whose check is most of a
        run's time, are checked after the last one, and in every fourth step of single items after each.
        """
        if self.media is not None:
            found = [(item, self.scheduler.sequences.get(item.seq_id)) for item in plan.items]
            assert all(sequence is None or self.media.is_ready(item, sequence) for item, sequence in found)
            self.media.end_step()
        result = self.executor.execute(plan)
        per_call = 1 if self.tick % 2 else len(plan.items)
        for start in range(0, len(plan.items), max(per_call, 1)):
            items = plan.items[start : start + per_call]
            sequences = [self.scheduler.sequences.get(item.seq_id) for item in items]
            self.scheduler.update_from_results(items, result.items[start : start + per_call])
            for sequence, item in zip(sequences, items, strict=True):
                if sequence is not None:
                    self._know_prompt_logprobs(sequence, item.start, len(item.token_ids))
            if self.tick % 8 == 1:
                self.audit()
            elif self.is_audited:
                self.auditor.check_queues()
        self.scheduler.advance_beams(plan.beams, result.beams)
        self.audit()
        self.peak_blocks = max(self.peak_blocks, self.memory.usage().used)
        self.tick += 1

    def step(self) -> StepPlan:
        """Plan, execute, advance."""
        plan = self.plan()
        self.finish_step(plan)
        return plan

    def abort(self, request: Request) -> None:
        """End a request early."""
        self.scheduler.abort(request.request_id)
        self.audit()

    def audit(self) -> None:
        """Check every invariant of memory and of the queues."""
        if self.is_audited:
            check(self.memory)
            self.auditor.check_queues()
            assert self.memory.usage().saved_bytes == sum(
                (count - 1) * group.spec.bytes_per_block
                for group in self.memory.groups
                for count in group.pool.ref_counts
                if count
            )

    def _know_prompt_logprobs(self, sequence: Sequence, start: int, count: int) -> None:
        """Count the prompt's log probabilities that a step returned; none may be missing in between."""
        request = sequence.request
        if request.params.prompt_logprobs is None or start >= request.num_prompt - 1:
            return
        assert start <= request.num_known_prompt_logprobs, "a prefix hit swallowed prompt log probabilities"
        last = min(start + count, request.num_prompt - 1)
        request.num_known_prompt_logprobs = max(request.num_known_prompt_logprobs, last)


def run(jobs: list[Job], setting: Setting, *, is_audited: bool = True) -> Outcome:
    """Run jobs to their end, with arrivals and aborts as they say; afterwards nothing is held.

    The seed of a job is its place in the list.
    """
    harness = Harness(setting, is_audited)
    added: dict[int, Request] = {}
    by_arrival = sorted(range(len(jobs)), key=lambda i: (jobs[i].arrives_at, i))
    most_steps = 200 + 40 * sum(len(job.prompt) + (job.beam_width or job.n) * job.max_tokens for job in jobs)
    last_event = max((job.arrives_at for job in jobs), default=0)
    while harness.tick <= last_event or harness.scheduler.has_unfinished:
        assert harness.tick < most_steps, "the run does not end"
        for i in by_arrival:
            if jobs[i].arrives_at == harness.tick:
                added[i] = harness.add(jobs[i], seed=i)
        for i, request in added.items():
            if jobs[i].abort_at == harness.tick and not jobs[i].abort_while_running:
                harness.abort(request)
        plan = harness.plan()
        for i, request in added.items():
            if jobs[i].abort_at == harness.tick and jobs[i].abort_while_running:
                harness.abort(request)
        harness.finish_step(plan)
    # The data plane is told of closed sequences with the next step, which needs another request.
    passer_by = harness.add(Job(prompt=(0,)), seed=len(jobs))
    assert len(harness.plan().finished_ids) == harness.executor.num_open, (
        "the data plane is not told of all that are gone"
    )
    harness.abort(passer_by)
    usage = harness.memory.usage()
    assert usage.used == 0, "M11: blocks are held by nobody"
    assert usage.host is None or usage.host.used == 0, "M11: host blocks are held by nobody"
    assert not harness.scheduler.requests
    assert not harness.scheduler.sequences
    outputs = [outputs_of(added[i]) for i in range(len(jobs))]
    requests = [added[i] for i in range(len(jobs))]
    return Outcome(outputs, requests, harness.scheduler, harness.executor, harness.tick, harness.peak_blocks)


def finish_all(harness: Harness) -> None:
    """Step until everybody has ended; nothing is held."""
    while harness.scheduler.has_unfinished:
        harness.step()
    usage = harness.memory.usage()
    assert usage.used == 0
    assert usage.host is None or usage.host.used == 0


def prompt(length: int, token_id: int = 1) -> tuple[int, ...]:
    """Return a prompt of one token."""
    return (token_id,) * length


def outputs_of(request: Request) -> list[list[int]]:
    """Return the tokens of a request's samples, or of the best `n` that a search has found."""
    if request.search is None:
        return [sequence.output_token_ids for sequence in request.sequences]
    return [list(hypothesis.token_ids) for hypothesis in request.search.finished[: request.params.n]]
