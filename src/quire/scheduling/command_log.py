"""A log of the commands that a scheduler is given, from which other processes plan the same steps (M10).

Ranks that share a model each have a scheduler and a memory manager of their own. The first one's is given its commands
by the engine; they are written down in order, and the others repeat them. So no plan travels, only requests, aborts,
the tokens of each step, and what was decided by a clock. A digest of plan and block tables shows where ranks have come
to differ. It does not show a plan that only some of them make: where ranks share memory, what they exchange does
(`ops/native/rank_group.h`).

```
 ["add", REQUEST]                 Scheduler.add
 ["abort", REQUEST_ID, REASON]    Scheduler.abort
 ["rates", CHUNK, COPY, PREFILL]  chunk_tokens and preemption.rates, which come from measured times
 ["drafts", IS_MEASURING, [COST, ...]]  what an adaptive drafter goes by, from measured times as well
 ["known", REQUEST_ID, COUNT]     prompt positions whose log probabilities are known, which limit its hits
 ["plan", TICK]                   Scheduler.plan
 ["ahead", TICK]                  AsyncScheduler.plan_ahead, of the step behind the last one that was planned
 ["digest", TICK, DIGEST]         digest of that plan and of the block tables after it
 ["results", FIRST, [TOKENS, ...]]  Scheduler.update_from_results for items from the first on: a token, a list of
                                  tokens, null for a pooled result, [TOKENS, DRAFT] where a model has made drafts
 ["stop", SEQ, STRING]            Scheduler.finish_at_stop_string
 ["beams", [[[PARENT, TOKEN, SCORE, STOP], ...], ...]]  Scheduler.advance_beams
 ["reset"]                        Scheduler.reset_prefix_cache
 ["pin", NAME, TOKENS, NAMESPACE], ["unpin", NAME]  KVCacheManager.pin and unpin
 ["adapter", SLOT, DIGEST, FOLDER]  what the data plane has in a slot from now on; null twice for nothing
 ["write_through"], ["save"]      what is done with the prefix cache on disk
 ["close"]                        the end
```

Results are those of the oldest plan that has not had all of its results. `log_messages` has the form in which commands
travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Any, Final, Protocol

from quire.errors import LockstepDrift
from quire.scheduling.async_scheduling import AsyncScheduler
from quire.scheduling.decode_columns import DecodeItems, DecodeResults
from quire.scheduling.edits import SequenceEvent
from quire.scheduling.log_messages import Command, decode, encode, encode_short, result_of, single_tokens, tokens_of
from quire.scheduling.logged_memory import LoggedMemory, repeat_pin
from quire.scheduling.microbatches import MicrobatchScheduler
from quire.scheduling.plan import BeamGroup, Candidate, ItemResult, ScheduledSequence, StepPlan
from quire.scheduling.plans_in_flight import PlansInFlight
from quire.scheduling.preemption import TransferRates
from quire.scheduling.scheduler import Scheduler
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.request_json import check_travels, request_from_json, request_to_json
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason

# Steps from one digest to the next.
DIGEST_INTERVAL: Final = 32


def digest_of(plan: StepPlan, scheduler: Scheduler) -> str:
    """Return a digest of a plan and of the block tables of all running sequences."""
    memory = scheduler.memory
    items = [(item[:5], item.num_draft, item.new_sequence is None) for item in plan.items]
    tables = [[tuple(table) for table in memory.sequences[sequence.seq_id].tables] for sequence in scheduler.running]
    state = (plan.tick, items, plan.ops.copies, plan.finished_ids, plan.beams, tables)
    return blake2b(repr(state).encode(), digest_size=16).hexdigest()


class LoggedScheduler:
    """A scheduler whose commands are written down; all else is the scheduler's.

    Args:
        inner: the scheduler.
        send: function that takes the commands since the last call, as bytes. It is called before each plan, so that
            others plan at the same time, and as soon as a step's results are there.
        digest_interval: steps from one digest to the next.
    """

    def __init__(self, inner: Scheduler, send: Callable[[bytes], None], digest_interval: int = DIGEST_INTERVAL) -> None:
        pending: list[Command] = []
        vars(self).update(
            _inner=inner,
            _send=send,
            _pending=pending,
            memory=LoggedMemory(inner.memory, pending.append),
            _rates=None,
            _draft_costs=None,
            _known={},
            _plans=PlansInFlight(),
            _digest_interval=digest_interval,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def add(self, request: Request) -> None:
        """See `Scheduler.add`.

        Raises:
            UnsupportedFeature: the request cannot be planned by others.
        """
        check_travels(request)
        command = ["add", request_to_json(request)]
        self._inner.add(request)
        if request.params.prompt_logprobs is not None:
            self._known[request.request_id] = 0
        self._pending.append(command)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Sequence]:
        """See `Scheduler.abort`."""
        self._pending.append(["abort", request_id, reason.value])
        ended: list[Sequence] = self._inner.abort(request_id, reason)
        return ended

    def plan(self, tick: int) -> StepPlan:
        """See `Scheduler.plan`."""
        self._log_plan("plan", tick)
        plan: StepPlan = self._inner.plan(tick)
        self._plans.begin(plan)
        self._log_digest(plan)
        return plan

    def plan_ahead(self, tick: int, in_flight: StepPlan) -> StepPlan | None:
        """See `AsyncScheduler.plan_ahead`."""
        self._log_plan("ahead", tick)
        plan: StepPlan | None = self._inner.plan_ahead(tick, in_flight)
        if plan is not None:
            self._plans.add(plan)
            self._log_digest(plan)
        return plan

    def _log_plan(self, name: str, tick: int) -> None:
        """Send what measured times have decided, and that a plan is made."""
        inner, rates = self._inner, self._inner.preemption.rates
        measured = (inner.chunk_tokens, rates.copy_bytes_per_s, rates.prefill_tokens_per_s)
        if measured != self._rates:
            vars(self)["_rates"] = measured
            self._pending.append(["rates", *measured])
        if isinstance(inner.drafter, AdaptiveDrafter):
            costs = inner.drafter.is_measuring, list(inner.drafter.step_costs)
            if costs != self._draft_costs:
                vars(self)["_draft_costs"] = costs
                self._pending.append(["drafts", *costs])
        for request_id, count in list(self._known.items()):
            request = inner.requests.get(request_id)
            if request is None:
                del self._known[request_id]
            elif request.num_known_prompt_logprobs != count:
                self._known[request_id] = request.num_known_prompt_logprobs
                self._pending.append(["known", request_id, request.num_known_prompt_logprobs])
        if self._pending:
            self._pending.append([name, tick])
            self.flush()
        else:
            self._send(encode_short(name, tick))

    def _log_digest(self, plan: StepPlan) -> None:
        if plan.tick % self._digest_interval == 0:
            self._pending.append(["digest", plan.tick, digest_of(plan, self._inner)])

    def update_from_results(self, items: Seq[ScheduledSequence], results: Iterable[ItemResult]) -> list[SequenceEvent]:
        """See `Scheduler.update_from_results`."""
        results = results if isinstance(results, DecodeResults) else tuple(results)
        planned, first = self._plans.oldest.items, 0
        if items and len(items) < len(planned):
            first = next(idx for idx, item in enumerate(planned) if item.seq_id == items[0].seq_id)
        self._plans.take(first + len(items))
        tokens = None if self._pending else single_tokens(results)
        if tokens is None:
            self._pending.append(["results", first, list(map(tokens_of, results))])
            self.flush()
        else:
            self._send(encode_short("results", first) + tokens)
        events: list[SequenceEvent] = self._inner.update_from_results(items, results)
        return events

    def finish_at_stop_string(self, sequence: Sequence, stop: str) -> None:
        """See `Scheduler.finish_at_stop_string`."""
        self._pending.append(["stop", sequence.seq_id, stop])
        self._inner.finish_at_stop_string(sequence, stop)

    def advance_beams(self, groups: Iterable[BeamGroup], found: Iterable[tuple[Candidate, ...]]) -> list[SequenceEvent]:
        """See `Scheduler.advance_beams`."""
        found = tuple(found)
        candidates = [[[each.parent_idx, each.token_id, each.score, each.stop] for each in group] for group in found]
        self._pending.append(["beams", candidates])
        events: list[SequenceEvent] = self._inner.advance_beams(groups, found)
        return events

    def reset_prefix_cache(self) -> None:
        """See `Scheduler.reset_prefix_cache`."""
        self._pending.append(["reset"])
        self._inner.reset_prefix_cache()

    def log_adapter(self, slot: int, digest: str | None, folder: str | None) -> None:
        """Write down the adapter that a slot of the data plane has from now on; None twice for none."""
        self._pending.append(["adapter", slot, digest, folder])

    def log_and_send(self, name: str) -> None:
        """Write down a command of `FollowingParts`, and send it."""
        self._pending.append([name])
        self.flush()

    def close_log(self) -> None:
        """End the log."""
        self._pending.append(["close"])
        self.flush()

    def flush(self) -> None:
        """Send the commands since the last call."""
        if self._pending:
            message = encode(self._pending)
            self._pending.clear()
            self._send(message)


class FollowingParts(Protocol):
    """Parts of a process besides its scheduler that follow the log."""

    def put_adapter(self, slot: int, digest: str | None, folder: str | None) -> None:
        """Repeat `LoggedScheduler.log_adapter`."""

    def reset(self) -> None:
        """Delete the prefix cache outside of memory."""

    def write_through(self) -> None:
        """Save the blocks of the sequences that have ended."""

    def save(self) -> None:
        """Save the prefix cache before the end."""


class CommandReplay:
    """Repeats the commands of a log.

    Args:
        scheduler: scheduler that was made as the log's was.
        parts: other parts of this process that follow the log; None for none.
        runs_ahead: True to yield the plans of microbatches as they are made; False as the log's process executes them.

    Attributes:
        is_closed: True after the end of the log.
    """

    def __init__(self, scheduler: Scheduler, parts: FollowingParts | None = None, *, runs_ahead: bool = True) -> None:
        self.is_closed = False
        self._runs_ahead = runs_ahead
        self._parts = parts
        self._scheduler = scheduler
        self._plans = PlansInFlight()

    def apply(self, commands: bytes) -> Iterator[StepPlan]:
        """Repeat commands, and yield each new plan that has items; it is to be executed before the next one.

        Raises:
            LockstepDrift: a plan, or the block tables, are not those of the log.
        """
        scheduler = self._scheduler
        for name, *given in decode(commands):
            match name:
                case "plan":
                    plan = scheduler.plan(given[0])
                    self._plans.begin(plan)
                    if self._runs_ahead and isinstance(scheduler, MicrobatchScheduler):
                        yield from scheduler.new_plans
                    elif plan.items:
                        yield plan
                case "ahead" if isinstance(scheduler, AsyncScheduler):
                    ahead = scheduler.plan_ahead(given[0], self._plans.newest)
                    if ahead is not None:
                        self._plans.add(ahead)
                        yield ahead
                case "digest":
                    self._check(*given)
                case "results":
                    self._update(*given)
                case "add":
                    scheduler.add(request_from_json(given[0]))
                case "abort":
                    scheduler.abort(given[0], FinishReason(given[1]))
                case "rates":
                    scheduler.chunk_tokens = given[0]
                    scheduler.preemption.rates = TransferRates(*given[1:])
                case "drafts":
                    assert isinstance(scheduler.drafter, AdaptiveDrafter)
                    scheduler.drafter.is_measuring, scheduler.drafter.step_costs = given
                case "known":
                    scheduler.requests[given[0]].num_known_prompt_logprobs = given[1]
                case "stop":
                    sequence = scheduler.sequences.get(given[0])
                    if sequence is not None:  # otherwise it has ended, and only its reason changes
                        scheduler.finish_at_stop_string(sequence, given[1])
                case "beams":
                    found = [tuple(Candidate(*each[:3])._replace(stop=each[3]) for each in group) for group in given[0]]
                    scheduler.advance_beams(self._plans.read.beams, found)
                case "reset":
                    scheduler.reset_prefix_cache()
                    if self._parts is not None:
                        self._parts.reset()
                case "pin":
                    repeat_pin(scheduler.memory, *given)
                case "unpin":
                    scheduler.memory.unpin(given[0])
                case "adapter" if self._parts is not None:
                    self._parts.put_adapter(*given)
                case "write_through" if self._parts is not None:
                    self._parts.write_through()
                case "save" if self._parts is not None:
                    self._parts.save()
                case "close":
                    self.is_closed = True
                case _:
                    raise LockstepDrift(f"the log has a command {name!r} that is not known here")

    def _update(self, first: int, tokens: list[Any]) -> None:
        plan, end = self._plans.oldest, first + len(tokens)
        items = plan.items if (first, end) == (0, len(plan.items)) else plan.items[first:end]
        if len(items) < len(tokens):
            raise LockstepDrift(
                f"the plan of step {plan.tick} has {len(plan.items)} sequences here, and rank 0 has results of {end}"
            )
        self._plans.take(end)
        results: Seq[ItemResult]
        if isinstance(items, DecodeItems) and set(map(type, tokens)) == {int}:
            results = DecodeResults(items.seq_ids, tokens)
        else:
            results = [result_of(item.seq_id, each) for item, each in zip(items, tokens, strict=True)]
        self._scheduler.update_from_results(items, results)

    def _check(self, tick: int, digest: str) -> None:
        # The block tables change with the results, which follow in the log.
        plan = self._plans.newest
        own = digest_of(plan, self._scheduler)
        if plan.tick != tick or own != digest:
            raise LockstepDrift(
                f"the plan of step {tick}, or the block tables after it, are not those of rank 0 (digest {own} here, "
                f"{digest} there)"
            )
