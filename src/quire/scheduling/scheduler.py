"""The scheduler: who runs in a step, with how many tokens, and in whose memory.

There are no phases. A sequence has pending tokens: one while it decodes, more while its prompt (or, after a
preemption, all that it had) is computed in chunks.

Memory is granted in policy order, so the first sequence always grows and always finishes. The token budget is
granted to decodes first: one token each is set aside before any chunk is cut.

Invariants: S1 to S6.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Tokens

from quire.decoding.edits import Append, Finish, Fork
from quire.decoding.strategies import Strategy
from quire.errors import InvalidParameter, InvariantViolation, PromptTooLong
from quire.memory.manager import KVCacheManager
from quire.memory.ops import NO_OPS
from quire.memory.recorder import RecordedMemory
from quire.scheduling.admission import Admission
from quire.scheduling.plan import Opening, PlanItem, StepPlan
from quire.scheduling.policies import ORDER_POLICIES
from quire.scheduling.preemption import Preemption
from quire.scheduling.queues import Queues
from quire.scheduling.stats import SchedulerStats
from quire.sequences.request import Request
from quire.sequences.sequence import FinishReason, Sequence, SequenceStatus

# Looking a member up in its enumeration takes as long as a call.
_RUNNING = SequenceStatus.RUNNING


class Scheduler:
    """Plans steps over the sequences of all requests.

    Args:
        memory: the manager, which this scheduler alone commands.
        strategy: how requests are decoded.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of a step; at least `max_num_seqs`.
        policy: a name in `ORDER_POLICIES`.
        preemption_policy: a name in `PREEMPTION_POLICIES`: whose memory is taken.
        preemption_mode: "recompute", "swap" or "auto": how it is given back; see `Preemption`.
        prepare: called for each sequence before its prefix is matched; it, and who is behind it, waits while that
            says False.

    Attributes:
        waiting, running, swapped: see `Queues`.
        preemption: has the costs that the engine measures.
        chunk_tokens: of prompts in a step in which sequences decode, at most; None for all that the budget leaves.
    """

    def __init__(
        self,
        memory: KVCacheManager | RecordedMemory,
        strategy: Strategy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
        preemption_policy: str = "last",
        preemption_mode: str = "auto",
        prepare: Callable[[Sequence], bool] | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{max_num_batched_tokens} tokens a step cannot serve {max_num_seqs} sequences")
        self.memory = memory
        self.strategy = strategy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_tokens: int | None = None
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self.stats = SchedulerStats()
        self._queues = Queues()
        # The queues themselves, not copies.
        self.waiting, self.running, self.swapped = self._queues.waiting, self._queues.running, self._queues.swapped
        self.preemption = Preemption(memory, self._queues, self.stats, policy=preemption_policy, mode=preemption_mode)
        self._admission = Admission(
            memory,
            self._queues,
            self.stats,
            self.preemption,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prepare=prepare,
        )
        self._order = ORDER_POLICIES[policy]
        self._next_seq_id = 0

    # ---- requests come and go ----

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: it could never fit the KV cache, whatever else leaves.
            InvalidParameter: it asks for more samples than can run at once.
            ValueError: its id is in use, or its prompt leaves no room within its own `max_total_tokens`.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id!r} exists already")
        if not 0 < request.num_prompt < request.max_total_tokens:
            raise ValueError(f"{request.num_prompt} prompt tokens leave no room within {request.max_total_tokens}")
        if request.params.num_sequences > self.max_num_seqs:
            raise InvalidParameter("n", request.params.num_sequences, f"at most max_num_seqs ({self.max_num_seqs})")
        if not self.memory.can_ever_hold(request.max_total_tokens):
            # Lengths that fit come before those that do not.
            lengths = range(1, request.max_total_tokens)
            room = bisect_left(lengths, True, key=lambda length: not self.memory.can_ever_hold(length))
            limit = max(0, room - (request.max_total_tokens - request.num_prompt))
            raise PromptTooLong(request.num_prompt, limit, "the KV cache (with room for the output asked for)")
        tokens = list(request.prompt_token_ids)
        self._queues.enter(self._open(request, 0, tokens))
        self.requests[request.request_id] = request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Sequence]:
        """End a request, whatever state it is in, and free all that it holds.

        Args:
            request_id: may be unknown, or finished already.
            reason: what the sequences that end get as their finish reason.

        Returns:
            The sequences that were not finished; empty for an unknown request.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        ended = [sequence for sequence in request.sequences if not sequence.is_finished]
        for sequence in ended:
            self._end(sequence, reason, None)
        self.requests.pop(request_id, None)
        return ended

    @property
    def has_unfinished(self) -> bool:
        """True while any sequence waits, runs or is swapped out."""
        return bool(self._queues)

    # ---- a step ----

    def plan(self, tick: int) -> StepPlan:
        """Decide the next step. Every running sequence that can grow is in it, in policy order."""
        preemptions_before = self.stats.num_preemptions
        granted: list[tuple[Sequence, int]] = []
        spare = self._serve(granted)
        if spare > 0 and self.stats.num_preemptions == preemptions_before and (self.waiting or self.swapped):
            self._admission.let_in(granted, spare)
        if not granted:
            if self.running:
                # A family is back from the host as it was, without a free block: its first takes from the others.
                self._serve(granted)
            if not granted:
                if self.running:
                    raise InvariantViolation("S3", "no running sequence can grow")
                # Nothing will be executed: closings and copies wait for a plan that is.
                return StepPlan(tick, (), NO_OPS, ())
        # Only now do all tables stand: what is granted later may move blocks of who was served before.
        items = tuple([self._item(sequence, count) for sequence, count in granted])
        closed = tuple(self._queues.closed)
        self._queues.closed.clear()
        return StepPlan(tick, items, self.memory.take_ops(), closed)

    def advance(self, item: PlanItem, token_ids: Tokens[int]) -> list[tuple[Sequence, Append | Finish]]:
        """Take in what a step gave one of its items: publish, fork, append, finish.

        Args:
            item: of the plan that was executed.
            token_ids: the tokens drawn, `item.num_samples` of them.

        Returns:
            What happened to which sequence, in order; nothing when the item's sequence ended while the step ran.
        """
        sequence = self.sequences.get(item.seq_id)
        if sequence is None or sequence.status is not _RUNNING:
            return []
        sequence.num_computed += len(item.token_ids)
        self.memory.publish(item.seq_id, sequence.num_computed)
        if not token_ids:
            return []
        news: list[tuple[Sequence, Append | Finish]] = []
        samples = sequence.request.sequences
        for edit in self.strategy.advance(sequence, token_ids):
            if isinstance(edit, Append):
                sample_idx, token_id, _ = edit
                target = samples[sample_idx]
                target.tokens.append(token_id)
                news.append((target, edit))
            elif isinstance(edit, Fork):
                self._fork(sequence, edit.sample_idx)
            else:
                target = samples[edit.sample_idx]
                self.finish(target, edit.reason, edit.stop_reason)
                news.append((target, edit))
        return news

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence and free its memory; forget the request when it was the last one."""
        self._end(sequence, reason, stop_reason)
        if sequence.request.is_finished:
            del self.requests[sequence.request.request_id]

    # ---- parts of a plan ----

    def _serve(self, granted: list[tuple[Sequence, int]]) -> int:
        """Grant slots to the running sequences, in order.

        Args:
            granted: who is served is added, with the tokens.

        Returns:
            The tokens of the budget that are left.
        """
        running, append_slots = self.running, self.memory.append_slots
        pending_counts = [len(sequence.tokens) - sequence.num_computed for sequence in running]
        num_decoding = pending_counts.count(1)
        spare = self.max_num_batched_tokens - num_decoding
        if num_decoding and self.chunk_tokens is not None:
            spare = min(spare, self.chunk_tokens)
        # Whoever is preempted on the way stands behind the position.
        for position, sequence in enumerate(running):
            pending = len(sequence.tokens) - sequence.num_computed
            count = pending if pending == 1 else min(pending, spare)
            if count > 1:
                count = self.memory.step_limit(sequence.seq_id, count)
            if count > 0 and not append_slots(sequence.seq_id, count):
                count = self._grow(sequence, count, position)
            if count > 0:
                if pending > 1:
                    spare -= count
                granted.append((sequence, count))
        return spare

    def _grow(self, sequence: Sequence, count: int, position: int) -> int:
        """Get slots for `count` tokens that were just refused, by taking memory from the unplanned tail.

        Returns:
            The tokens that have slots: 0 when there is nobody left to take from, and the sequence keeps its blocks
            and yields this step. The first in order never does: a chunk that is too long for a window's pool is cut
            until it fits. So some sequence always advances.
        """
        while True:
            unplanned = self.running[position + 1 :]
            if unplanned:
                self.preemption.take_from(unplanned)
            elif position == 0 and count > 1:
                count //= 2
            else:
                return 0
            if self.memory.append_slots(sequence.seq_id, count):
                return count

    def _item(self, sequence: Sequence, count: int) -> PlanItem:
        """Return a sequence's share of the step: its next `count` tokens."""
        seq_id, start, tokens = sequence.seq_id, sequence.num_computed, sequence.tokens
        end = start + count
        opening = None if sequence.is_open else self._opening(sequence)
        num_samples = self.strategy.num_draws(sequence) if end == len(tokens) else 0
        deltas = self.memory.take_table_deltas(seq_id)
        return PlanItem(seq_id, start, tuple(tokens[start:end]), deltas, num_samples, opening)

    def _opening(self, sequence: Sequence) -> Opening:
        """Return what the data plane must know of a sequence, and note that it will."""
        sequence.is_open = True
        request = sequence.request
        return Opening(
            request.params,
            request.seed,
            sequence.sample_idx,
            sequence.num_prompt,
            tuple(sequence.tokens),
            request.suppressed_ids,
            request.media,
            request.bad_words,
            request.dry_breakers,
        )

    # ---- lives of sequences ----

    def _fork(self, parent: Sequence, sample_idx: int) -> None:
        """Open another sample of a request as a copy of a running sequence; its blocks are shared."""
        child = self._open(parent.request, sample_idx, parent.tokens.copy(), parent)
        child.num_computed = parent.num_computed
        child.move_to(SequenceStatus.RUNNING)
        self._queues.enter(child)

    def _open(self, request: Request, sample_idx: int, tokens: list[int], parent: Sequence | None = None) -> Sequence:
        """Make a sequence, forked from a parent where there is one."""
        seq_id = self._next_seq_id
        self._next_seq_id += 1
        if parent is None:
            chain = self.memory.chain(tokens, request.namespace, [media.span for media in request.media])
        else:
            chain = self.memory.fork(parent.seq_id, seq_id, tokens)
        sequence = Sequence(seq_id, request, sample_idx, tokens, chain, (*self._order(request), sample_idx))
        request.sequences.append(sequence)
        self.sequences[seq_id] = sequence
        return sequence

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None) -> None:
        """Finish a sequence; it holds nothing afterwards (S4)."""
        if sequence.status is not SequenceStatus.WAITING:
            is_sound = reason is not FinishReason.ERROR
            self.memory.free(sequence.seq_id, retain=sequence.request.retain_cache, is_sound=is_sound)
            self._queues.close(sequence)
        self._queues.move(sequence, SequenceStatus.FINISHED)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        del self.sequences[sequence.seq_id]
