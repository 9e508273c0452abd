"""The plans in flight (without results yet), as the followers of a scheduler track them."""

from __future__ import annotations

from quire.scheduling.plan import StepPlan


class PlansInFlight:
    """Up to two plans in flight; see `AsyncScheduler`.

    Attributes:
        newest: plan that was made last.
        oldest: plan whose results arrive next.
        read: plan whose results arrived last.
    """

    newest: StepPlan
    oldest: StepPlan
    read: StepPlan

    def begin(self, plan: StepPlan) -> None:
        """Begin with a plan, while none is in flight."""
        self.newest = self.oldest = self.read = plan

    def add(self, plan: StepPlan) -> None:
        """Add the plan of a step that is launched after `newest`, which is the only plan in flight."""
        self.newest = plan

    def take(self, end: int) -> None:
        """Record that the results of the oldest plan's items before `end` have arrived."""
        self.read = self.oldest
        if end == len(self.oldest.items):
            self.oldest = self.newest
