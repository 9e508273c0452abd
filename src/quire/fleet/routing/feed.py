"""The feed of one replica's KV events: batches with sequence numbers, some of which may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from quire.memory.kv_events import AllBlocksCleared, KVEvent


class FeedState(Enum):
    """State of the router's knowledge of a replica's blocks.

    Values:
        UNKNOWN: no batch has arrived yet.
        SYNCED: all blocks are known.
        GAP: batches are missing.
    """

    UNKNOWN = auto()
    SYNCED = auto()
    GAP = auto()


class FeedStep(Enum):
    """Treatment of a batch.

    Values:
        APPLY: apply its events.
        RESTART: forget the replica's blocks, then apply its events.
        IGNORE: do nothing, because it was applied before, or batches before it are missing.
    """

    APPLY = auto()
    RESTART = auto()
    IGNORE = auto()


class EventFeed:
    """The order of one replica's batches."""

    def __init__(self) -> None:
        self.state = FeedState.UNKNOWN
        self.next_seq = 0
        self.num_gaps = 0
        # Number of the last batch that was not replayed.
        self._last_live = -1

    def accept(self, seq: int, events: Sequence[KVEvent], *, is_replay: bool = False) -> FeedStep:
        """Take a batch and return the treatment of it.

        Batch 0 begins with an empty cache, and a batch that begins with `AllBlocksCleared` needs no earlier batches. A
        publisher sends each number once and in order, so a repeated number means that the publisher was restarted.
        """
        if not is_replay:
            if seq <= self._last_live:
                self.lose()
                self.next_seq = 0
            self._last_live = seq
        clears = not seq or (bool(events) and isinstance(events[0], AllBlocksCleared))
        if seq == self.next_seq or (clears and seq > self.next_seq):
            self.next_seq, self.state = seq + 1, FeedState.SYNCED
            return FeedStep.RESTART if clears else FeedStep.APPLY
        if seq > self.next_seq and self.state is not FeedState.GAP:
            self.state = FeedState.GAP
            self.num_gaps += 1
        return FeedStep.IGNORE

    def lose(self) -> None:
        """Record that batches may be missing."""
        if self.state is FeedState.SYNCED:
            self.state = FeedState.GAP
            self.num_gaps += 1

    def reset(self) -> None:
        """Start again with another publisher."""
        self.state, self.next_seq, self._last_live = FeedState.UNKNOWN, 0, -1
