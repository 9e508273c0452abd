"""An executor that launches a step and returns before its tokens are read."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from quire.errors import WorkerError
from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.runners.executor import Runner
from quire.execution.runners.runner import InProcessExecutor
from quire.execution.step.device_health import step_error
from quire.scheduling.decode_columns import DecodeResults
from quire.scheduling.plan import ItemResult, StepPlan, StepResult

# Fields of all results, without a Python call for each.
_ERROR: Final = attrgetter("error")
_PROMPT_LOGPROBS: Final = attrgetter("prompt_logprobs")
_DRAFT: Final = attrgetter("draft")


class LaunchedStep:
    """A step that was launched; its result is read once.

    Args:
        launched: result of the step, with empty results where tokens are to be read; or why it failed.
        reads: functions that return the results of items whose tokens are on the device.
    """

    __slots__ = ("_launched", "_reads")

    def __init__(
        self, launched: StepResult | WorkerError, reads: Sequence[Callable[[], Sequence[ItemResult]]] = ()
    ) -> None:
        self._launched = launched
        self._reads = reads

    @property
    def has_failed(self) -> bool:
        """True where the step could not be launched."""
        return isinstance(self._launched, WorkerError)

    def result(self) -> StepResult:
        """Wait for the step, and return its result.

        Raises:
            WorkerError: the step failed as a whole.
        """
        launched = self._launched
        if isinstance(launched, WorkerError):
            raise launched
        try:
            parts = [each() for each in self._reads]
        except Exception as error:
            raise step_error(f"step {launched.tick} failed in the data plane", error) from error
        if not parts:
            return launched
        if len(parts) == 1 and isinstance(parts[0], DecodeResults) and len(parts[0]) == len(launched.items):
            return launched._replace(items=parts[0])
        is_plain = not any(any(map(field, launched.items)) for field in (_ERROR, _PROMPT_LOGPROBS, _DRAFT))
        if is_plain and len(parts) == 1 and len(parts[0]) == len(launched.items):
            return launched._replace(items=tuple(parts[0]))
        read = {result.seq_id: result for part in parts for result in part}
        return launched._replace(items=tuple([_complete(item, read) for item in launched.items]))


class AsyncExecutor(InProcessExecutor):
    """Runs steps in the caller's own process and thread, which need not wait for them.

    Args:
        runner: runner of the model, whose sampler keeps tokens in `deferred`.
        deferred: tokens that are not read yet.
    """

    def __init__(self, runner: Runner, deferred: DeferredTokens) -> None:
        super().__init__(runner)
        self._deferred = deferred

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step, behind those that were launched before; a failure is raised where its result is read.

        Args:
            plan: plan in which `UNKNOWN` stands for a token that the step launched last has drawn.
        """
        self._deferred.begin_step()
        try:
            launched = super().execute(plan)
        except WorkerError as error:
            _clear_frames(error)
            return LaunchedStep(error)
        if any(map(_ERROR, launched.items)):
            self._deferred.add_failed([item.seq_id for item in launched.items if item.error is not None])
        return LaunchedStep(launched, self._deferred.take_reads())

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see `Executor`."""
        return self.launch(plan).result()


def _clear_frames(error: BaseException | None) -> None:
    """Let go of the tensors of the calls that have failed, which an error that is kept would keep: a step's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _complete(item: ItemResult, read: dict[int, ItemResult]) -> ItemResult:
    """Return the result of an item with what was read of it."""
    found = read.get(item.seq_id)
    if found is None or item.error is not None:
        return item
    if found.error is not None or not (item.prompt_logprobs or item.draft):
        return found
    return found._replace(prompt_logprobs=item.prompt_logprobs, draft=item.draft)
