"""The state of an unfinished request of a simulated replica."""

from __future__ import annotations

from quire.measurement.simulation.request import SimulatedRequest
from quire.sequences.sequence import Sequence


class LiveRequest:
    """An unfinished request of a replica."""

    __slots__ = (
        "first_s",
        "last_s",
        "num_cached",
        "num_new",
        "num_prompt",
        "num_remaining",
        "request",
        "sequence",
    )

    def __init__(
        self, request: SimulatedRequest, sequence: Sequence, num_prompt: int, num_new: int, num_cached: int | None
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.num_prompt = num_prompt
        self.num_new = self.num_remaining = num_new
        self.num_cached = num_cached
        self.first_s = self.last_s = -1.0
