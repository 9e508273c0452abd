"""The plans whose results are not there yet, as those who follow a scheduler know them."""

from __future__ import annotations

from quire.scheduling.plan import StepPlan


class PlansInFlight:
    """Up to two plans whose results are not there; see `AsyncScheduler`.

    Attributes:
        newest: plan that was made last.
        oldest: plan whose results come next.
        read: plan whose results came last.
    """

    newest: StepPlan
    oldest: StepPlan
    read: StepPlan

    def begin(self, plan: StepPlan) -> None:
        """Begin with a plan, while none is in flight."""
        self.newest = self.oldest = self.read = plan

    def add(self, plan: StepPlan) -> None:
        """Add the plan of a step that is launched behind the newest one, the only one in flight."""
        self.newest = plan

    def take(self, end: int) -> None:
        """Note that the results of the oldest plan's items before `end` are there."""
        self.read = self.oldest
        if end == len(self.oldest.items):
            self.oldest = self.newest
