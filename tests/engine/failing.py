"""Data planes that fail at random points of a step, and do up to there what they were told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import WorkerError
from quire.execution.runners.executor import Executor
from quire.execution.step.block_copies import BlockCopier
from quire.memory.results import BlockCopy, MemoryOps, StoredBlock
from quire.scheduling.plan import LaunchedStep, StepPlan, StepResult
from tests.scheduling.simulated_executor import SimulatedExecutor

# Failures in a row after which an engine ends.
MOST_IN_A_ROW = 2


class Failures:
    """Decides which steps fail.

    Args:
        rng: decides.
        share: of the steps that fail.
        share_of_copying: of the steps with copies that fail; None for the same.

    Attributes:
        num_lost_copies: copies of the failed steps.
    """

    def __init__(self, rng: random.Random, share: float, share_of_copying: float | None = None) -> None:
        self.rng = rng
        self._shares = (share, share if share_of_copying is None else share_of_copying)
        self._num_in_a_row = 0
        self.count = 0
        self.num_lost_copies = 0

    def end(self) -> None:
        """Let no step fail from now on."""
        self._shares = (0.0, 0.0)

    def is_next(self, plan: StepPlan) -> bool:
        """Say whether a step fails."""
        if self._num_in_a_row == MOST_IN_A_ROW or self.rng.random() >= self._shares[bool(plan.ops.copies)]:
            self._num_in_a_row = 0
            return False
        self._num_in_a_row += 1
        self.count += 1
        self.num_lost_copies += len(plan.ops.copies)
        return True


class FailingSimulation(SimulatedExecutor):
    """A simulated data plane that fails before, within or after the closings, the copies, the writes and the draws.

    It closes a sequence a second time if it is told to: it may have failed after it did the first time.
    """

    failures: Failures

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Perform a step now; see `Executor`."""
        try:
            result = self.execute(plan)
        except WorkerError as error:
            return LaunchedStep.failed(error)
        return LaunchedStep(lambda: result)

    def execute(self, plan: StepPlan) -> StepResult:
        """Perform a step, or the first part of it."""
        assert len(set(plan.finished_ids)) == len(plan.finished_ids), "a sequence is finished twice by one plan"
        plan = plan._replace(finished_ids=tuple(seq_id for seq_id in plan.finished_ids if seq_id in self._open))
        if not self.failures.is_next(plan):
            return super().execute(plan)
        rng = self.failures.rng
        num_closed = rng.randint(0, len(plan.finished_ids))
        # What follows begins once all of what comes before is done: a sequence may be closed and opened by one plan.
        are_closed = num_closed == len(plan.finished_ids)
        num_copies = rng.randint(0, len(plan.ops.copies)) if are_closed else 0
        num_items = rng.randint(0, len(plan.items)) if are_closed and num_copies == len(plan.ops.copies) else 0
        for seq_id in plan.finished_ids[:num_closed]:
            del self._open[seq_id]
        for copy in plan.ops.copies[:num_copies]:
            self._copy_block(copy)
        for item in plan.items[:num_items]:
            self._write(item, {})
        raise WorkerError(f"step {plan.tick} failed after {num_closed}, {num_copies} and {num_items}")


class FailingExecutor:
    """The real data plane, whose copies fail at a random place, or which fails once it has done everything.

    Args:
        executor: does the work.
        blocks: of its tiers.
        failures: says when.
    """

    def __init__(self, executor: Executor, blocks: BlockCopier, failures: Failures) -> None:
        self.executor = executor
        self.failures = failures
        self._blocks = blocks
        self._apply: Callable[..., Any] = blocks.apply
        # What is launched behind a step that fails when it is read is worth nothing, and fails no more.
        self._is_void = False

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step; a failing one fails at its launch, at some copy, or when it is read."""
        executor = self.executor
        is_void, self._is_void = self._is_void, False
        if is_void or not self.failures.is_next(plan):
            return executor.launch(plan)
        num_copies = self.failures.rng.randint(0, len(plan.ops.copies) + 1)

        def fail_at_copy(copies: Sequence[BlockCopy], saves: Sequence[StoredBlock] = ()) -> None:
            self._apply(copies[:num_copies], saves)
            raise WorkerError(f"step {plan.tick} failed after {num_copies} copies")

        def fail_when_read() -> Any:
            launched.result()
            raise WorkerError(f"step {plan.tick} failed at its end")

        if num_copies > len(plan.ops.copies):
            launched = executor.launch(plan)
            self._is_void = True
            return LaunchedStep(fail_when_read)
        if not plan.ops.copies:
            return LaunchedStep.failed(WorkerError(f"step {plan.tick} failed at its beginning"))
        self._blocks.apply = fail_at_copy  # type: ignore[method-assign,assignment]
        try:
            return executor.launch(plan)
        finally:
            self._blocks.apply = self._apply  # type: ignore[method-assign]

    def measure_copies(self) -> float | None:
        """See `Executor`."""
        return self.executor.measure_copies()

    def move(self, ops: MemoryOps) -> None:
        """See `Executor`."""
        self.executor.move(ops)

    def close(self) -> None:
        """See `Executor`."""
        self.executor.close()
