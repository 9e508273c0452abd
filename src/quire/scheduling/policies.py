"""Small decisions, each readable in one breath: who comes first, and who gives its memory back."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from quire.sequences.sequence import Request, Sequence

# A later request of the same flow counts as if it had come so many requests after the one before, for each sample.
FLOW_STRIDE = 16
# But no request is overtaken by more later ones than this for its flow's sake.
MAX_FLOW_DELAY = 4096

# Candidates in order, and what taking the memory of one would waste.
PreemptionPolicy = Callable[[Seq[Sequence], Callable[[Sequence], float]], Sequence]


class Order:
    """The place of each request among all, fixed when it comes: the first two parts of its sequences' keys.

    A request's *turn* is its arrival, counted in requests; but requests of one flow (a tenant's, or the prompts of one
    body) take their turns `FLOW_STRIDE` apart, though at most `MAX_FLOW_DELAY` behind their arrival. Under the policy
    "priority" a level of priority is worth `aging` turns. So at most `aging` later requests overtake one for each level
    by which their priority is lower, and nothing waits for ever.

    Args:
        policy: "fcfs" or "priority".
        aging: requests that a level of priority is worth.

    Attributes:
        has_priorities: True where priorities count.
    """

    def __init__(self, policy: str, aging: int) -> None:
        self.has_priorities = policy == "priority"
        self._aging = aging
        # By flow, the turn that its next request has at least.
        self._next_turns: dict[str, int] = {}

    def key_of(self, request: Request) -> tuple[int, int]:
        """Return the place of a request that has just come (S6)."""
        turn = request.arrival
        if request.flow is not None:
            turn = min(max(turn, self._next_turns.pop(request.flow, 0)), turn + MAX_FLOW_DELAY)
            self._next_turns[request.flow] = turn + FLOW_STRIDE * request.params.num_sequences
            self._forget_flows(request.arrival)
        if self.has_priorities:
            turn += self._aging * request.priority
        return turn, request.arrival

    def _forget_flows(self, arrival: int) -> None:
        """Forget those of the longest unused flows whose next turn has come."""
        flow = next(iter(self._next_turns))
        while self._next_turns[flow] <= arrival:
            del self._next_turns[flow]
            flow = next(iter(self._next_turns))

    def outranks(self, request: Request, other: Request) -> bool:
        """Say whether a request may take the memory of another that runs: it is more urgent, and comes before it."""
        return self.has_priorities and request.priority < other.priority and request.order_key < other.order_key


def last_in_order(candidates: Seq[Sequence], waste: Callable[[Sequence], float]) -> Sequence:  # noqa: ARG001
    """Take the memory of the sequence that comes last: it has waited least and computed least."""
    return candidates[-1]


def least_waste(candidates: Seq[Sequence], waste: Callable[[Sequence], float]) -> Sequence:
    """Take the memory whose loss costs least for what it frees; of equals, the last in order."""
    return min(reversed(candidates), key=waste)


PREEMPTION_POLICIES: dict[str, PreemptionPolicy] = {"last": last_in_order, "least_waste": least_waste}
