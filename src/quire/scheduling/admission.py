"""Admission: who comes in beside the running sequences, new or back from a preemption, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import InvariantViolation
from quire.memory.manager import KVCacheManager
from quire.memory.status import AllocStatus, HitEnd, PrefixHit, Verdict
from quire.scheduling.gangs import seats_of
from quire.scheduling.policies import Order
from quire.scheduling.preemption import Preemption
from quire.scheduling.queues import Queues
from quire.scheduling.stats import SchedulerStats
from quire.sequences.sequence import Sequence
from quire.sequences.status import SequenceStatus


@dataclass(slots=True)
class Room:
    """What a step has left for those who come in.

    Args:
        granted: who is part of the step, with how many tokens.
        spare: tokens of the budget.
        seats: places among the sequences that run at once.
        reserved: blocks of each group that those who are in will still ask for.
    """

    granted: dict[Sequence, int]
    spare: int
    seats: int
    reserved: list[int]


class Admission:
    """Lets sequences in, strictly in order: who lacks room keeps everybody behind out, so that nobody starves.

    Args:
        memory: the manager.
        queues: of the scheduler.
        stats: counted in.
        preemption: drops samples of a swapped family that no longer fits as one.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of a step.
        prepare: called for each sequence before its prefix is matched; it waits while that says False.
        order: says who may take whose memory.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        queues: Queues,
        stats: SchedulerStats,
        preemption: Preemption,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prepare: Callable[[Sequence], bool] | None = None,
        order: Order,
    ) -> None:
        self._memory = memory
        self._queues = queues
        self._stats = stats
        self._preemption = preemption
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prepare = prepare
        self._order = order

    def make_way(self) -> None:
        """Take the memory of running sequences of a lower priority where the first who is out lacks room.

        Nobody loses memory where that of all whom it outranks would not be enough.
        """
        first = self._queues.first_out() if self._order.has_priorities else None
        while first is not None:
            lower = [s for s in self._queues.running if self._order.outranks(first.request, s.request)]
            if not lower or not self._is_prepared(first) or not self._lacks_what_they_have(first, lower):
                return
            self._preemption.take_from(lower)

    def _is_prepared(self, sequence: Sequence) -> bool:
        """Say whether the prefix of a sequence may be matched; one that is swapped out needs none."""
        return self._prepare is None or sequence.status is SequenceStatus.SWAPPED or self._prepare(sequence)

    def _lacks_what_they_have(self, first: Sequence, lower: list[Sequence]) -> bool:
        """Say whether a sequence that is out lacks room which others, if they all lost their memory, would give it."""
        memory, is_swapped = self._memory, first.status is SequenceStatus.SWAPPED
        coming = self._family_of(first) if is_swapped else [first]
        room, num_seats = self._room_beside({}, 1), sum(map(seats_of, coming))
        if num_seats > room.seats + sum(map(seats_of, lower)):
            return False
        if is_swapped:
            status = self._swap_in_status(coming, room)
        else:
            status = self._allocate_status(first, memory.match_prefix(first.chain, first.request.hit_limit), room)
        if status.verdict is Verdict.OK:
            return num_seats > room.seats
        # In bytes of the group that lacks most: an estimate from above, since others may hold some of the blocks too.
        lacking_bytes = (status.needed - status.available) * memory.groups[status.group_idx].spec.bytes_per_block
        return memory.capacity.would_release([s.seq_id for s in lower]).freed_bytes >= lacking_bytes

    def let_in(self, granted: dict[Sequence, int], spare: int) -> None:
        """Let in who waits or is swapped out, in order, until tokens, seats or memory say stop.

        Args:
            granted: who is part of the step already; those who come in are added.
            spare: tokens of the budget that are left, at least one.
        """
        room = self._room_beside(granted, spare)
        while room.spare > 0:
            first = self._queues.first_out()
            if first is None:
                break
            is_swapped = first.status is SequenceStatus.SWAPPED
            if not (self._bring_back(first, room) if is_swapped else self._admit(first, room)):
                break

    def _room_beside(self, granted: dict[Sequence, int], spare: int) -> Room:
        """Return what the running sequences leave to those who come in; see `let_in`."""
        running = self._queues.running
        seats = self._max_num_seqs - sum(map(seats_of, running))
        room = Room(granted, spare, seats, [0] * len(self._memory.groups))
        # Sequences already in will ask for the rest of their prompts.
        for sequence in running:
            if sequence.num_pending > 1:
                self._reserve(room, sequence)
        return room

    def _admit(self, sequence: Sequence, room: Room) -> bool:
        """Open a waiting sequence on its longest hit and grant its first tokens, if there is room for all it has."""
        memory, num_tokens = self._memory, len(sequence.tokens)
        if seats_of(sequence) > room.seats:
            return False
        if not self._is_prepared(sequence):
            return False
        hit = memory.match_prefix(sequence.chain, sequence.request.hit_limit)
        step = self._max_num_batched_tokens
        status = self._allocate_status(sequence, hit, room)
        if status.verdict is Verdict.LATER and not self._queues.running:
            # Alone, it need not wait for more room than its shortest steps take.
            step = 1
            status = memory.capacity.can_allocate(num_tokens, hit, step)
        if status.verdict is Verdict.LATER:
            return False
        if status.verdict is Verdict.NEVER:
            raise InvariantViolation("S3", f"sequence {sequence.seq_id} can never fit: {status}")
        memory.allocate(sequence.seq_id, sequence.chain, hit)
        count = memory.step_limit(sequence.seq_id, min(num_tokens - hit.num_tokens, room.spare))
        while not memory.append_slots((sequence.seq_id,), count):
            if count <= step:
                raise InvariantViolation("S2", f"sequence {sequence.seq_id} was promised memory: {status}")
            count //= 2
        self._count_hit(sequence, hit)
        sequence.num_computed = hit.num_tokens
        self._enter(sequence, count, room)
        return True

    def _bring_back(self, first: Sequence, room: Room) -> bool:
        """Swap a family in again, if there is room for all that its samples have; who gets slots is in the step.

        Beams get them all together. While nobody runs, a family that does not fit as one loses its last samples to
        recomputation: they shared more before they wrote tokens of their own. So some sample always comes back, or, of
        beams, the prompt.
        """
        memory, queues = self._memory, self._queues
        family = self._family_of(first)
        if sum(map(seats_of, family)) > room.seats:
            return False
        while self._swap_in_status(family, room).verdict is not Verdict.OK:
            if queues.running:
                return False
            self._preemption.drop(family[-1])
            family = [sequence for sequence in family if sequence.status is SequenceStatus.SWAPPED]
            if not family:
                return True
        seq_ids = [sequence.seq_id for sequence in family]
        memory.swap_in(seq_ids)
        if first.is_beam:
            count = int(len(family) <= room.spare and memory.append_slots(seq_ids, atomic=True))
            for sequence in family:
                self._enter(sequence, count, room)
            return True
        for sequence in family:
            count = memory.step_limit(sequence.seq_id, min(sequence.num_pending, room.spare))
            if count > 0 and not memory.append_slots((sequence.seq_id,), count):
                count = 0
            self._enter(sequence, count, room)
        return True

    def _family_of(self, first: Sequence) -> list[Sequence]:
        """Return the samples that come back together with one that is swapped out."""
        return [sequence for sequence in self._queues.swapped if sequence.request is first.request]

    def _allocate_status(self, sequence: Sequence, hit: PrefixHit, room: Room) -> AllocStatus:
        """Return whether a waiting sequence fits beside those that run."""
        # Beams that lack room as soon as they part would begin again.
        num_beams = sequence.request.params.beam_width or 0
        reserved = [count + num_beams for count in room.reserved]
        return self._memory.capacity.can_allocate(len(sequence.tokens), hit, self._max_num_batched_tokens, reserved)

    def _swap_in_status(self, family: list[Sequence], room: Room) -> AllocStatus:
        """Return whether a family fits beside those that run; alone, its shortest steps count."""
        seq_ids, lengths = [sequence.seq_id for sequence in family], [len(sequence.tokens) for sequence in family]
        step = self._max_num_batched_tokens if self._queues.running else 1
        return self._memory.capacity.can_swap_in(seq_ids, lengths, step, room.reserved)

    def _enter(self, sequence: Sequence, count: int, room: Room) -> None:
        """Have a sequence run, with `count` tokens in this step; none are granted to one that lacked slots."""
        room.seats -= seats_of(sequence)
        room.spare -= count
        self._reserve(room, sequence)
        self._queues.move(sequence, SequenceStatus.RUNNING)
        if count:
            room.granted[sequence] = count

    def _reserve(self, room: Room, sequence: Sequence) -> None:
        """Add the blocks of each group that a sequence will still ask for to hold all the tokens it has."""
        missing = self._memory.capacity.blocks_missing(
            sequence.seq_id, len(sequence.tokens), self._max_num_batched_tokens
        )
        for idx, count in enumerate(missing):
            room.reserved[idx] += count

    def _count_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Count an admission's prefix hit: first-time and resumed apart, and only what was looked up."""
        request, stats = sequence.request, self._stats
        num_queried = len(sequence.tokens)
        if hit.end is HitEnd.LIMIT:
            num_queried = hit.num_tokens
        num_staged = len({load.block_idx for load in hit.loads} & sequence.staged)
        account = hit.account(len(sequence.tokens), num_staged * self._memory.block_size)
        if request.account is None:
            request.note_hit(hit, account)
            stats.first_time = stats.first_time.plus(account)
            stats.prefix_queries += num_queried
            stats.prefix_hits += hit.num_tokens
        else:
            stats.resumed = stats.resumed.plus(account)
            stats.resumed_queries += num_queried
            stats.resumed_hits += hit.num_tokens
