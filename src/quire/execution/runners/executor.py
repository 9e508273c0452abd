"""The interface of executors, which carry a plan to the data plane, and its result back."""

from __future__ import annotations

from typing import Protocol

from quire.memory.results import MemoryOps
from quire.scheduling.plan import LaunchedStep, StepPlan, StepResult


class Runner(Protocol):
    """Executes plans on one device; methods raise the data plane's own errors."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""

    def measure_copies(self) -> float | None:
        """Return the bytes that move between the tiers in a second, None without a host tier; before the first plan."""

    def move(self, ops: MemoryOps) -> None:
        """Move blocks without a step."""


class Executor(Protocol):
    """Carries plans to one or more workers."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step, which runs after the steps launched before.

        Args:
            plan: plan in which `UNKNOWN` stands for a token that the step launched last has drawn.

        Returns:
            The step, whose `result` raises a `WorkerError` if it failed as a whole; its cause is chained.
        """

    def measure_copies(self) -> float | None:
        """Return the bytes that move between the tiers in a second, None without a host tier; before the first step."""

    def move(self, ops: MemoryOps) -> None:
        """Move blocks without a step.

        Raises:
            WorkerError: they failed.
        """

    def close(self) -> None:
        """Release the workers and their memory."""
