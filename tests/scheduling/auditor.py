"""The scheduler's numbered invariants, S1 to S6, checked from outside."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from quire.scheduling import Scheduler, StepPlan
from quire.sequences import Request, Sequence, SequenceStatus
from quire.sequences.status import TRANSITIONS


class Before(NamedTuple):
    """What stood in the queues when a step was planned."""

    running: tuple[Sequence, ...]
    waiting: tuple[Sequence, ...]
    swapped: tuple[Sequence, ...]
    num_preemptions: int


class Auditor:
    """Watches one scheduler.

    Args:
        scheduler: looked at, never touched.
        held_back: sequences that wait for features of media, which changes with each plan.
    """

    def __init__(self, scheduler: Scheduler, held_back: Set[Sequence] = frozenset()) -> None:
        self.scheduler, self.held_back = scheduler, held_back
        self.statuses: dict[Sequence, SequenceStatus] = {}

    def check_queues(self) -> None:
        """S1, S2 (slots), S4, S5, and the order of each queue (S6)."""
        scheduler = self.scheduler
        queues = {
            SequenceStatus.WAITING: scheduler.waiting,
            SequenceStatus.RUNNING: scheduler.running,
            SequenceStatus.SWAPPED: scheduler.swapped,
        }
        everybody = [sequence for queue in queues.values() for sequence in queue]
        for status, queue in queues.items():
            keys = [sequence.key for sequence in queue]
            assert keys == sorted(set(keys)), "S6: a queue is out of order"
            assert all(sequence.status is status for sequence in queue), "S1"
        assert len(set(everybody)) == len(everybody), "S1: a sequence is in two queues"
        assert {sequence.seq_id for sequence in everybody} == scheduler.sequences.keys()
        running, swapped = scheduler.running, scheduler.swapped
        assert len(running) <= scheduler.max_num_seqs, "S2: more sequences run than there are slots"
        for request in scheduler.requests.values():
            alive = request.unfinished
            if request.search is not None and alive:
                assert len({sequence.status for sequence in alive}) == 1, "beams are torn apart"
                assert len({len(sequence.tokens) for sequence in alive}) == 1, "beams are not of one length"
                assert sorted(request.search.scores) == [sequence.sample_idx for sequence in alive]
                assert len(request.sequences) <= request.params.num_sequences, "beams take more places than they have"
        slots = [max(len(r.unfinished), r.params.num_sequences * (r.search is not None)) for r in self._running()]
        assert sum(slots) <= scheduler.max_num_seqs, "S2: beams to come have no slots"
        held = {seq_id: state.is_swapped for seq_id, state in scheduler.memory.sequences.items()}
        should_be = {s.seq_id: False for s in running} | {s.seq_id: True for s in swapped}
        assert held == should_be, (
            "S4: the holders of memory on a tier are not the sequences that run or are swapped out"
        )
        for sequence in (*running, *swapped):
            state = scheduler.memory.sequences[sequence.seq_id]
            assert state.num_computed == sequence.num_computed, "scheduler and memory count otherwise"
            assert state.chain is sequence.chain
            assert state.chain.tokens is sequence.tokens
        present = {sequence for request in scheduler.requests.values() for sequence in request.sequences}
        assert {s for s in present if not s.is_finished} == set(everybody), "S1: a sequence got lost"
        for sequence in present:
            old = self.statuses.get(sequence, SequenceStatus.WAITING)
            new = sequence.status
            assert new is old or new in TRANSITIONS[old], f"S5: {old} became {new}"
            assert (sequence.finish_reason is not None) == sequence.is_finished
            self.statuses[sequence] = new

    def _running(self) -> set[Request]:
        return {sequence.request for sequence in self.scheduler.running if sequence.request.search is not None}

    def before_plan(self) -> Before:
        """Remember the queues."""
        scheduler = self.scheduler
        running, waiting, swapped = map(tuple, (scheduler.running, scheduler.waiting, scheduler.swapped))
        return Before(running, waiting, swapped, scheduler.stats.num_preemptions)

    def after_plan(self, before: Before, plan: StepPlan) -> None:
        """S2, S3, S6, and that decodes and the first in order always go on."""
        scheduler, memory = self.scheduler, self.scheduler.memory
        planned = [item.seq_id for item in plan.items]
        assert len(set(planned)) == len(planned), "a sequence appears twice in a step"
        assert sum(len(item.token_ids) for item in plan.items) <= scheduler.max_num_batched_tokens, "S2: tokens"
        held_back = set(self.held_back)
        if (before.running or before.waiting or before.swapped) and not held_back:
            assert plan.items, "S3: an empty step, though there is work"
        assert held_back.isdisjoint(scheduler.sequences[seq_id] for seq_id in planned)
        for item in plan.items:
            end = item.start + len(item.token_ids)
            sequence = scheduler.sequences[item.seq_id]
            assert item.token_ids
            assert item.start == sequence.num_computed
            assert list(item.token_ids) == [*sequence.tokens[item.start :], *sequence.draft][: len(item.token_ids)]
            assert item.num_draft == len(sequence.draft)
            is_last = end - item.num_draft == len(sequence.tokens)
            assert (item.num_samples > 0) == is_last, "draws before the last pending token"
            assert is_last or not item.num_draft
            assert memory.sequences[item.seq_id].num_slots == end, "slots for more or fewer than the step's tokens"
        still_running = set(scheduler.running)
        lost = [s for s in before.running if s not in still_running]
        if before.running and before.running[0] in held_back:
            pass
        elif before.running and before.running[0] in still_running:
            assert planned[0] == before.running[0].seq_id, "the first in order does not go on"
        elif before.running:
            assert scheduler.running[0].key < before.running[0].key, "the first in order lost its memory for nobody"
        self._check_lockstep(set(planned), plan, set(before.running))
        for sequence in before.running:
            is_left_out = sequence in still_running - held_back and sequence.seq_id not in planned
            if sequence.num_pending == 1 and is_left_out and not sequence.is_beam:
                # It lacks a block of some groups; or, behind a fork, a copy of its last one.
                needs = list(memory.capacity.blocks_missing(sequence.seq_id, len(sequence.tokens)))
                for idx, group in enumerate(memory.groups):
                    is_shared = group.pool.ref_counts[memory.block_table(sequence.seq_id, idx)[-1]] > 1
                    needs[idx] = max(needs[idx], is_shared and sequence.num_computed % memory.block_size > 0)
                assert not memory.arena.fits(needs), "a decode starves while there are blocks"
        out = sorted((*before.waiting, *before.swapped), key=lambda sequence: sequence.key)
        admitted = [s for s in out if s.status is SequenceStatus.RUNNING]
        # A search that does not fit any more has begun again, and its beams are gone.
        left = [s for s in out if not s.is_finished and s.status is not SequenceStatus.RUNNING]
        for sequence in left:
            # Swapped samples of a request come back together; one of them that is recomputed may still wait.
            later = [s for s in admitted if s.key > sequence.key and s.request is not sequence.request]
            assert not later, "S6: a request was overtaken"
        if before.running and scheduler.stats.num_preemptions > before.num_preemptions and admitted:
            first = admitted[0].request
            has_made_way = [s.request.priority > first.priority and s.request.order_key > first.order_key for s in lost]
            assert all(has_made_way), "a request was admitted in a step that preempted others"
        for sequence in scheduler.swapped:
            samples = sequence.request.sequences
            assert all(s.status is not SequenceStatus.RUNNING for s in samples), "a family was torn apart"

    def _check_lockstep(self, planned: set[int], plan: StepPlan, ran: set[Sequence]) -> None:
        """All beams of a search are in a step, as one group, or none is.

        None is only where blocks are lacking, or where the beams were swapped in and the step has no tokens left.

        Args:
            ran: sequences that were running before the step was planned.
        """
        memory, groups = self.scheduler.memory, {group.seq_ids: group for group in plan.beams}
        for request in self._running():
            beams = [sequence for sequence in self.scheduler.running if sequence.request is request]
            seq_ids = tuple(beam.seq_id for beam in beams)
            if not beams[0].is_beam:
                continue
            if planned & set(seq_ids):
                assert groups[seq_ids].scores == tuple(request.search.scores[b.sample_idx] for b in beams)  # type: ignore[union-attr]
                continue
            if ran.isdisjoint(beams):
                continue
            needs = [0] * len(memory.groups)
            for idx, group in enumerate(memory.groups):
                tails = [memory.block_table(seq_id, idx)[-1] for seq_id in seq_ids]
                is_written = group.spec.is_recurrent or beams[0].num_computed % memory.block_size > 0
                held = [group.pool.ref_counts[tail] - tails.count(tail) for tail in set(tails)]
                copies = len(tails) - held.count(0)
                needs[idx] = copies if is_written else len(tails)
            assert not memory.arena.fits(needs), "beams starve while there are blocks"
