"""Queues of unfinished sequences: each sequence is in one queue, and each queue is in order."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from quire.sequences.sequence import Sequence
from quire.sequences.status import SequenceStatus

_KEY = attrgetter("key")


class Queues:
    """The waiting, running and swapped sequences.

    Attributes:
        waiting: sequences without memory, new or preempted.
        running: sequences with memory on the device.
        swapped: sequences with memory on the host; the data plane still knows them.
        held: running sequences that the present plan leaves out, which are not in `running` meanwhile; see
            `Microbatches`. Empty between plans.
        finished_ids: ids of the sequences that the next executed plan tells the data plane to forget.

    Invariants: S1 (one queue), S5 (legal changes), S6 (each queue in order).
    """

    __slots__ = ("_by_status", "finished_ids", "held", "running", "swapped", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.held: list[Sequence] = []
        self.finished_ids: list[int] = []
        self._by_status = {
            SequenceStatus.WAITING: self.waiting,
            SequenceStatus.RUNNING: self.running,
            SequenceStatus.SWAPPED: self.swapped,
        }

    def enter(self, sequence: Sequence) -> None:
        """Insert a sequence that is in no queue into the queue of its status."""
        insort(self._by_status[sequence.status], sequence, key=_KEY)

    def move(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Change a sequence's status and queue; a finished sequence is in no queue.

        Raises:
            InvariantViolation: S5, a change that is not allowed.
        """
        old = self._by_status[sequence.status]
        sequence.move_to(status)
        old.remove(sequence)
        if status is not SequenceStatus.FINISHED:
            self.enter(sequence)

    def release_held(self) -> None:
        """Put the held sequences back into the running queue."""
        for sequence in self.held:
            self.enter(sequence)
        self.held = []

    def close(self, sequence: Sequence) -> None:
        """Mark a sequence to be forgotten by the data plane, if it is known there."""
        if sequence.is_open:
            sequence.is_open = False
            self.finished_ids.append(sequence.seq_id)

    def first_not_running(self) -> Sequence | None:
        """Return the first waiting or swapped sequence in order."""
        return min((*self.waiting[:1], *self.swapped[:1]), key=_KEY, default=None)

    def __bool__(self) -> bool:
        """Return whether any queue has a sequence."""
        return bool(self.waiting or self.running or self.swapped)
