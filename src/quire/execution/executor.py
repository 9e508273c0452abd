"""Executors carry a plan to the data plane, and its result back."""

from __future__ import annotations

from typing import Protocol

from quire.errors import WorkerError
from quire.execution.runner import ModelRunner
from quire.memory.results import MemoryOps
from quire.scheduling.plan import StepPlan, StepResult


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


class InProcessExecutor:
    """Runs every step in the caller's own process and thread.

    Args:
        runner: model runner, which executes plans.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner: ModelRunner | None = runner

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises:
            WorkerError: the step failed as a whole, or the executor is closed.
        """
        if self._runner is None:
            raise WorkerError(f"step {plan.tick} cannot run: the executor is closed")
        try:
            return self._runner.execute(plan)
        except Exception as error:
            raise WorkerError(f"step {plan.tick} failed in the data plane ({type(error).__name__}: {error})") from error

    def measure_copies(self) -> float | None:
        """Return the bytes that move between the tiers in a second, None without a host tier; before the first step."""
        return None if self._runner is None else self._runner.measure_copies()

    def move(self, ops: MemoryOps) -> None:
        """Make movements without a step.

        Raises:
            WorkerError: they failed.
        """
        if self._runner is None:
            return
        try:
            self._runner.move(ops)
        except Exception as error:
            raise WorkerError(f"blocks could not be moved ({type(error).__name__}: {error})") from error

    def close(self) -> None:
        """Drop the runner, and with it the weights and the KV memory."""
        self._runner = None
