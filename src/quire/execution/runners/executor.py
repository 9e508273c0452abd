"""The interface of executors, which carry a plan to the data plane, and its result back."""

from __future__ import annotations

from typing import Protocol

from quire.memory.results import MemoryOps
from quire.scheduling.plan import StepPlan, StepResult


class Runner(Protocol):
    """Executes plans on one device; methods raise what the data plane raises."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""

    def measure_copies(self) -> float | None:
        """Return the bytes that move between the tiers in a second, None without a host tier; before the first plan."""

    def move(self, ops: MemoryOps) -> None:
        """Make movements without a step."""


class Executor(Protocol):
    """Carries plans to one or more workers."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises:
            WorkerError: the step failed as a whole; its cause is chained.
        """

    def measure_copies(self) -> float | None:
        """Return the bytes that move between the tiers in a second, None without a host tier; before the first step."""

    def move(self, ops: MemoryOps) -> None:
        """Make movements without a step.

        Raises:
            WorkerError: they failed.
        """

    def close(self) -> None:
        """Let go of the workers and of all that they hold."""
