"""States of a sequence, and finish reasons."""

from __future__ import annotations

from enum import Enum


class SequenceStatus(Enum):
    """State of a sequence; it changes only as `TRANSITIONS` allow (S5)."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"

    # Members are compared by identity, and `Enum`'s own hash is a Python-level call.
    __hash__ = object.__hash__


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.SWAPPED, SequenceStatus.FINISHED}),
    SequenceStatus.SWAPPED: frozenset({SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """The reason for the end of a sequence."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    # Reason of a dropped beam, which no client sees.
    DROPPED = "dropped"
