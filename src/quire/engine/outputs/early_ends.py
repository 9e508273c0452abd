"""Early ends of requests: aborts, errors of single requests, and steps that the data plane could not execute."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from quire.engine.outputs.output_processor import OutputProcessor
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import DeviceFailed, RequestFailed, WorkerError
from quire.scheduling.plan import ScheduledSequence, StepPlan
from quire.scheduling.scheduler import Scheduler
from quire.sequences.kv_transfer import LOAD_FAILED
from quire.sequences.status import FinishReason

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3


class EarlyEnds:
    """Ends requests before their last token, in the scheduler and in the outputs."""

    def __init__(self, scheduler: Scheduler, outputs: OutputProcessor) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self.num_failed_steps = 0

    def end(
        self, request_id: str, reason: FinishReason, error: str | None = None, error_code: str | None = None
    ) -> list[RequestOutput]:
        """End a request in any state, and free its memory."""
        if request_id not in self._outputs:
            return []
        ended = self._scheduler.abort(request_id, reason)
        state = self._outputs.remove(request_id)
        for sequence in ended:
            state.add_finish(sequence)
        return [state.take_output(is_finished=True, error=error, error_code=error_code)]

    def end_without_blocks(self, failed: Iterable[tuple[str, str]]) -> list[RequestOutput]:
        """End the requests whose blocks were required from another engine, but did not arrive."""
        return self._end_each(
            ((request_id, f"kv_load_failure_policy is 'fail': {why}") for request_id, why in failed), LOAD_FAILED
        )

    def end_without_image(self, failed: Iterable[tuple[str, str]]) -> list[RequestOutput]:
        """End the requests whose image could not be encoded."""
        return self._end_each(failed, "engine_failed")

    def _end_each(self, failed: Iterable[tuple[str, str]], code: str) -> list[RequestOutput]:
        """End requests with the error of each."""
        outputs: list[RequestOutput] = []
        for request_id, error in failed:
            outputs += self.end(request_id, FinishReason.ERROR, error, code)
        return outputs

    def fail_item(self, item: ScheduledSequence, error: str, *, is_own_fault: bool = False) -> list[RequestOutput]:
        """End the request of one item with an error; return its last output, or nothing if it has ended already."""
        sequence = self._scheduler.sequences.get(item.seq_id)
        if sequence is None:
            return []
        code = RequestFailed.code if is_own_fault else "engine_failed"
        return self.end(sequence.request.request_id, FinishReason.ERROR, error, code)

    def fail_step(self, plan: StepPlan, error: WorkerError) -> list[RequestOutput]:
        """End every request of a step that the data plane could not execute, and discard the step's target blocks."""
        if isinstance(error, DeviceFailed):
            raise error
        self.num_failed_steps += 1
        if self.num_failed_steps >= MAX_CONSECUTIVE_FAILURES:
            raise WorkerError(f"{self.num_failed_steps} steps in a row failed; the last one: {error}") from error
        outputs = [output for item in plan.items for output in self.fail_item(item, str(error))]
        _warn_of_pins(self._scheduler.recover(plan))
        return outputs

    def withdraw_step(self, plan: StepPlan) -> None:
        """Undo a plan that was made ahead, before an earlier step failed; its requests continue."""
        _warn_of_pins(self._scheduler.withdraw(plan))


def _warn_of_pins(names: Iterable[str]) -> None:
    for name in names:
        logger.warning("the pinned prefix %r is lost, since a step failed that was to move it", name)
