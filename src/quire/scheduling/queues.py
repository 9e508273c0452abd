"""Where sequences stand between their first and their last token: each in one queue, and each queue in order."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from quire.sequences.sequence import Sequence
from quire.sequences.status import SequenceStatus

_KEY = attrgetter("key")


class Queues:
    """Who waits, who runs and who is swapped out.

    Attributes:
        waiting: those without memory, new or preempted.
        running: those that hold memory on the device.
        swapped: those whose memory is on the host; what the data plane knows of them it keeps.
        finished_ids: sequences that the data plane is to forget with the next plan that is executed.

    Invariants: S1 (one queue), S5 (legal changes), S6 (each queue in order).
    """

    __slots__ = ("_by_status", "finished_ids", "running", "swapped", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.finished_ids: list[int] = []
        self._by_status = {
            SequenceStatus.WAITING: self.waiting,
            SequenceStatus.RUNNING: self.running,
            SequenceStatus.SWAPPED: self.swapped,
        }

    def enter(self, sequence: Sequence) -> None:
        """Put a sequence that is in no queue into the one of its status."""
        insort(self._by_status[sequence.status], sequence, key=_KEY)

    def move(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Change a sequence's status and queue; one that is finished is in none.

        Raises:
            InvariantViolation: S5, a change that is not allowed.
        """
        old = self._by_status[sequence.status]
        sequence.move_to(status)
        old.remove(sequence)
        if status is not SequenceStatus.FINISHED:
            self.enter(sequence)

    def close(self, sequence: Sequence) -> None:
        """Have the data plane forget a sequence, if it knows it."""
        if sequence.is_open:
            sequence.is_open = False
            self.finished_ids.append(sequence.seq_id)

    def first_not_running(self) -> Sequence | None:
        """Return the first in order of those that do not run; a family that is swapped out comes as one."""
        return min((*self.waiting[:1], *self.swapped[:1]), key=_KEY, default=None)

    def __bool__(self) -> bool:
        """Say whether anybody is in any queue."""
        return bool(self.waiting or self.running or self.swapped)
