"""A log of a scheduler's commands, from which other processes plan the same steps (M10).

Each of the ranks that share a model has its own scheduler and memory manager. The engine commands rank 0's scheduler;
an observer logs the commands in order, and the other ranks repeat them. So no plan travels, only requests, aborts, the
tokens of each step, and decisions that depend on a clock. A digest of plan and block tables shows that ranks have
diverged. It does not show a plan that only some ranks make; if ranks share memory, their exchanges show it
(`ops/native/rank_group.h`).

```
 ["add", REQUEST]                 Scheduler.add
 ["abort", REQUEST_ID, REASON]    Scheduler.abort
 ["rates", CHUNK, COPY, PREFILL]  chunk_tokens and preemption.rates, which come from measured times
 ["drafts", IS_MEASURING, [COST, ...]]  state of an adaptive drafter, also from measured times
 ["known", REQUEST_ID, COUNT]     prompt positions whose log probabilities are known, which limit its hits
 ["plan", TICK]                   Scheduler.plan
 ["ahead", TICK]                  Scheduler.plan_ahead, for the step after the last one planned
 ["digest", TICK, DIGEST]         digest of that plan and of the block tables after it
 ["results", SEQ, [TOKENS, ...]]  Scheduler.update_from_results for items from this sequence on: a token, a list of
                                  tokens, null for a pooled result, [TOKENS, DRAFT] if a model made drafts
 ["stop", SEQ, STRING]            Scheduler.finish_at_stop_string
 ["beams", [[[PARENT, TOKEN, SCORE, STOP], ...], ...]]  Scheduler.advance_beams
 ["reset"]                        Scheduler.reset_prefix_cache
 ["pin", NAME, TOKENS, NAMESPACE, SPANS], ["unpin", NAME]  Scheduler.pin and unpin
 ["features", ...]                features of an image that the encoder of rank 0 has made; see `engine.ranked_media`
 ["adapter", SLOT, DIGEST, FOLDER]  load an adapter into a slot of the data plane; null twice: empty it
 ["write_through"], ["save"]      writes of the prefix cache to disk
 ["close"]                        the end
```

Results belong to the oldest plan that has not had all of its results. `log_messages` has the wire format of commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Any, Final

from quire.errors import LockstepDrift
from quire.memory.prefix.token_chain import Namespace, TokenChain
from quire.memory.results import NO_OPS
from quire.scheduling.decode_columns import DecodeItems, DecodeResults, seq_ids_of
from quire.scheduling.log_messages import Command, decode, encode, encode_short, result_of, single_tokens, tokens_of
from quire.scheduling.plan import Candidate, ItemResult, ScheduledSequence, StepPlan
from quire.scheduling.preemption import TransferRates
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.scheduler_observer import SchedulerObserver
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.request_json import (
    check_travels,
    request_from_json,
    request_to_json,
    spans_from_json,
    spans_to_json,
)
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


class CommandStream:
    """The commands to the other ranks, in order: the scheduler's, and those of the parts beside it.

    Args:
        send: function that takes the commands since the last call, as bytes.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.send = send
        self.pending: list[Command] = []

    def put(self, name: str, *arguments: Any) -> None:
        """Add a command; it is sent with the next step, or by `flush`."""
        self.pending.append([name, *arguments])

    def flush(self) -> None:
        """Send the commands since the last call."""
        if self.pending:
            message = encode(self.pending)
            self.pending.clear()
            self.send(message)

    def close(self) -> None:
        """End the log."""
        self.put("close")
        self.flush()


class CommandLog(SchedulerObserver):
    """Logs a scheduler's commands.

    Args:
        scheduler: new scheduler; it reports its commands to the log from now on.
        stream: receives the commands. It is flushed before each plan, so that others plan at the same time, and as soon
            as a step has results.
        digest_interval: steps from one digest to the next.
        pack: function that returns the embeddings of a medium as a JSON value.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stream: CommandStream,
        digest_interval: int = DIGEST_INTERVAL,
        pack: Callable[[object], Any] = str,
    ) -> None:
        self._scheduler, self._pack = scheduler, pack
        self._stream, self._put = stream, stream.put
        self._digest_interval = digest_interval
        # Values from measured times that the other ranks have, by command.
        self._measured: dict[str, list[Any]] = {}
        self._num_known: dict[str, int] = {}
        scheduler.observer = self

    # ---- commands of the scheduler; see `SchedulerObserver` ----

    def add(self, request: Request) -> None:
        check_travels(request)
        self._put("add", request_to_json(request, self._pack))
        if request.params.prompt_logprobs is not None:
            self._num_known[request.request_id] = 0

    def abort(self, request_id: str, reason: FinishReason) -> None:
        self._put("abort", request_id, reason.value)

    def plan(self, tick: int) -> None:
        self._send_plan("plan", tick)

    def plan_ahead(self, tick: int) -> None:
        self._send_plan("ahead", tick)

    def planned(self, plan: StepPlan) -> None:
        if plan.tick % self._digest_interval == 0:
            self._put("digest", plan.tick, digest_of(plan, self._scheduler))

    def update_from_results(self, items: Seq[ScheduledSequence], results: Seq[ItemResult]) -> None:
        first = items.seq_ids[0] if isinstance(items, DecodeItems) else items[0].seq_id
        tokens = None if self._stream.pending else single_tokens(results)
        if tokens is None:
            self._put("results", first, list(map(tokens_of, results)))
            self._stream.flush()
        else:
            self._stream.send(encode_short("results", first) + tokens)

    def finish_at_stop_string(self, sequence: Sequence, stop: str) -> None:
        self._put("stop", sequence.seq_id, stop)

    def advance_beams(self, found: Seq[tuple[Candidate, ...]]) -> None:
        self._put(
            "beams", [[[each.parent_idx, each.token_id, each.score, each.stop] for each in group] for group in found]
        )

    def reset_prefix_cache(self) -> None:
        self._put("reset")

    def pinned(self, name: str, chain: TokenChain, num_tokens: int) -> None:
        spans = spans_to_json(span for span in chain.media if span.start < num_tokens)
        self._put("pin", name, chain.tokens[:num_tokens], list(Namespace.deserialise(chain.root.content)), spans)

    def unpinned(self, name: str) -> None:
        self._put("unpin", name)

    # ---- the log ----

    def _send_plan(self, name: str, tick: int) -> None:
        """Send a plan command, after the values from measured times that have changed."""
        scheduler, rates = self._scheduler, self._scheduler.preemption.rates
        measured: dict[str, list[Any]] = {
            "rates": [scheduler.chunk_tokens, rates.copy_bytes_per_s, rates.prefill_tokens_per_s]
        }
        if isinstance(scheduler.drafter, AdaptiveDrafter):
            measured["drafts"] = [scheduler.drafter.is_measuring, list(scheduler.drafter.step_costs)]
        for command, values in measured.items():
            if values != self._measured.get(command):
                self._measured[command] = values
                self._put(command, *values)
        for request_id, count in list(self._num_known.items()):
            request = scheduler.requests.get(request_id)
            if request is None:
                del self._num_known[request_id]
            elif request.num_known_prompt_logprobs != count:
                self._num_known[request_id] = request.num_known_prompt_logprobs
                self._put("known", request_id, request.num_known_prompt_logprobs)
        if self._stream.pending:
            self._put(name, tick)
            self._stream.flush()
        else:
            self._stream.send(encode_short(name, tick))


class CommandReplay:
    """Repeats the commands of a log.

    Args:
        scheduler: new scheduler with the arguments of the log's scheduler.
        others: functions that repeat the commands of other parts than the scheduler, by name. "reset" deletes the
            prefix cache outside of memory.
        unpack: inverse of the log's `pack`.
        runs_ahead: True to yield plans of microbatches when they are made; False when their results come next.

    Attributes:
        is_closed: True after the end of the log.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        others: Mapping[str, Callable[..., None]] | None = None,
        *,
        unpack: Callable[[Any], object] = str,
        runs_ahead: bool = True,
    ) -> None:
        self.is_closed, self._unpack = False, unpack
        self._runs_ahead = runs_ahead
        self._others = others or {}
        self._scheduler = scheduler
        # The plan that was made last; the one whose results arrive next, and the one whose results arrived last.
        self._newest = self._oldest = self._read = StepPlan(0, (), NO_OPS, ())

    def apply(self, commands: bytes) -> Iterator[StepPlan]:
        """Repeat commands, and yield each new plan that has items; it is to be executed before the next one.

        Raises:
            LockstepDrift: a plan, or the block tables, differ from the log's.
        """
        scheduler = self._scheduler
        for name, *given in decode(commands):
            match name:
                case "plan":
                    plan = scheduler.plan(given[0])
                    self._newest = self._oldest = self._read = plan
                    if self._runs_ahead and scheduler.microbatches is not None:
                        yield from scheduler.microbatches.new_plans
                    elif plan.items:
                        yield plan
                case "ahead":
                    ahead = scheduler.plan_ahead(given[0], self._newest)
                    if ahead is not None:
                        self._newest = ahead
                        yield ahead
                case "digest":
                    self._check(*given)
                case "results":
                    self._update(*given)
                case "add":
                    scheduler.add(request_from_json(given[0], self._unpack))
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
                    scheduler.advance_beams(self._read.beams, found)
                case "reset":
                    scheduler.reset_prefix_cache()
                    if name in self._others:
                        self._others[name]()
                case "pin":
                    self._pin(*given)
                case "unpin":
                    scheduler.unpin(given[0])
                case "close":
                    self.is_closed = True
                case _ if name in self._others:
                    self._others[name](*given)
                case _:
                    raise LockstepDrift(f"the log has a command {name!r} that is not known here")

    def _update(self, first_id: int, tokens: list[Any]) -> None:
        plan, seq_ids = self._oldest, seq_ids_of(self._oldest.items)
        first = seq_ids.index(first_id) if first_id in seq_ids else len(seq_ids)
        end = first + len(tokens)
        if end > len(seq_ids):
            raise LockstepDrift(
                f"the plan of step {plan.tick} has {len(seq_ids)} sequences here, and rank 0 has results of "
                f"{len(tokens)} from sequence {first_id} on"
            )
        items = plan.items if len(tokens) == len(seq_ids) else plan.items[first:end]
        self._read = plan
        if end == len(seq_ids):
            self._oldest = self._newest
        results: Seq[ItemResult]
        if isinstance(items, DecodeItems) and set(map(type, tokens)) == {int}:
            results = DecodeResults(items.seq_ids, tokens)
        else:
            results = [result_of(item.seq_id, each) for item, each in zip(items, tokens, strict=True)]
        self._scheduler.update_from_results(items, results)

    def _pin(self, name: str, tokens: list[int], namespace: list[Any], spans: list[list[Any]]) -> None:
        chain = self._scheduler.memory.chain(tokens, Namespace(*namespace), spans_from_json(spans))
        num_tokens = self._scheduler.pin(name, chain)
        if num_tokens != len(tokens):
            raise LockstepDrift(
                f"rank 0 has pinned {len(tokens)} tokens, of which {num_tokens} are in the prefix cache here"
            )

    def _check(self, tick: int, digest: str) -> None:
        # The block tables change with the results, which follow in the log.
        plan = self._newest
        own = digest_of(plan, self._scheduler)
        if plan.tick != tick or own != digest:
            raise LockstepDrift(
                f"the plan of step {tick}, or the block tables after it, are not those of rank 0 (digest {own} here, "
                f"{digest} there)"
            )
