"""Small decisions, each readable in one breath: who comes first, and who gives its memory back."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Candidates

from quire.sequences.request import Request
from quire.sequences.sequence import Sequence

# The first two parts of a sequence's place in every queue; its sample index is the third.
OrderPolicy = Callable[[Request], tuple[int, int]]
# Candidates in order, and what taking the memory of one would waste.
PreemptionPolicy = Callable[[Candidates[Sequence], Callable[[Sequence], float]], Sequence]


def first_come_first_served(request: Request) -> tuple[int, int]:
    """Order by arrival (S6)."""
    return 0, request.arrival


def by_priority(request: Request) -> tuple[int, int]:
    """Order by priority, lower first, then by arrival."""
    return request.priority, request.arrival


def last_in_order(candidates: Candidates[Sequence], waste: Callable[[Sequence], float]) -> Sequence:  # noqa: ARG001
    """Take the memory of the sequence that comes last: it has waited least and computed least."""
    return candidates[-1]


def least_waste(candidates: Candidates[Sequence], waste: Callable[[Sequence], float]) -> Sequence:
    """Take the memory whose loss costs least for what it frees; of equals, the last in order."""
    return min(reversed(candidates), key=waste)


ORDER_POLICIES: dict[str, OrderPolicy] = {"fcfs": first_come_first_served, "priority": by_priority}
PREEMPTION_POLICIES: dict[str, PreemptionPolicy] = {"last": last_in_order, "least_waste": least_waste}
