"""A request of a simulation."""

from __future__ import annotations

from typing import NamedTuple

from quire.measurement.simulation.replicas.tokens import TokenSpan, num_tokens


class SimulatedRequest(NamedTuple):
    """A request of a simulation.

    Args:
        arrival_s: time of arrival, in seconds from the start.
        prompt: spans of the prompt.
        num_new: number of new tokens.
        output_stream: stream of the new tokens.
        priority: priority; lower values run first under the policy "priority".
        session: key of its conversation or agent; None for an independent request.
        turn: number of turns of its session before this one.
    """

    arrival_s: float
    prompt: tuple[TokenSpan, ...]
    num_new: int
    output_stream: int
    priority: int = 0
    session: int | None = None
    turn: int = 0

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return num_tokens(self.prompt)

    @property
    def output(self) -> TokenSpan:
        """The span of the new tokens."""
        return TokenSpan(self.output_stream, 0, self.num_new)
