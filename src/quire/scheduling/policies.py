"""Scheduling policies: the order of requests, and the choice of the sequence to preempt."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from quire.sequences.sequence import Request, Sequence

# Distance between the turns of two requests of one flow, for each sample of the earlier request.
FLOW_STRIDE = 16
# Maximum distance between a request's arrival and its turn.
MAX_FLOW_DELAY = 4096

# Chooses a victim among candidates, which are in order; the second argument returns the waste of preempting one.
PreemptionPolicy = Callable[[Seq[Sequence], Callable[[Sequence], float]], Sequence]


class Order:
    """Order of the requests, fixed at their arrival: it gives the first two parts of their sequences' keys.

    A request's *turn* is its arrival, counted in requests. Requests of one flow (a tenant's, or the prompts of one HTTP
    body) have turns `FLOW_STRIDE` apart, but at most `MAX_FLOW_DELAY` after their arrival. Under the policy "priority",
    one priority level counts as `aging` turns. So for each level by which their priority value is lower, at most
    `aging` later requests overtake a request, and no request starves.
    """

    def __init__(self, policy: str, aging: int) -> None:
        self.has_priorities = policy == "priority"
        self._aging = aging
        # Lowest possible turn of the next request, by flow.
        self._next_turns: dict[str, int] = {}

    def key_of(self, request: Request) -> tuple[int, int]:
        """Return the key of a new request (S6)."""
        turn = request.arrival
        if request.flow is not None:
            turn = min(max(turn, self._next_turns.pop(request.flow, 0)), turn + MAX_FLOW_DELAY)
            self._next_turns[request.flow] = turn + FLOW_STRIDE * request.params.num_sequences
            self._forget_flows(request.arrival)
        if self.has_priorities:
            turn += self._aging * request.priority
        return turn, request.arrival

    def _forget_flows(self, arrival: int) -> None:
        """Remove the least recently used flows whose next turn has passed."""
        flow = next(iter(self._next_turns))
        while self._next_turns[flow] <= arrival:
            del self._next_turns[flow]
            flow = next(iter(self._next_turns))

    def outranks(self, request: Request, other: Request) -> bool:
        """Return whether a request may preempt a running one: its priority is higher, and it is earlier in order."""
        return self.has_priorities and request.priority < other.priority and request.order_key < other.order_key


def last_in_order(candidates: Seq[Sequence], waste: Callable[[Sequence], float]) -> Sequence:  # noqa: ARG001
    """Choose the last sequence in order, which has waited and computed least."""
    return candidates[-1]


def least_waste(candidates: Seq[Sequence], waste: Callable[[Sequence], float]) -> Sequence:
    """Choose the sequence with the least cost per freed byte; of equals, the last in order."""
    return min(reversed(candidates), key=waste)


PREEMPTION_POLICIES: dict[str, PreemptionPolicy] = {"last": last_in_order, "least_waste": least_waste}
