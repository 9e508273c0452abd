"""The engine with asynchronous scheduling: it launches the next step before it reads the tokens of the present one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from quire.engine.engine import Engine
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import WorkerError
from quire.execution.runners.async_executor import AsyncExecutor, LaunchedStep
from quire.scheduling.async_scheduling import AsyncScheduler
from quire.scheduling.decode_columns import DecodeItems, DecodeResults
from quire.scheduling.plan import ScheduledSequence, StepPlan


class StepInFlight(NamedTuple):
    """A step whose results are not applied yet.

    Args:
        plan: its plan.
        step: the launched step, whose result is read once.
        launched_s: time of its launch, on the engine's clock.
    """

    plan: StepPlan
    step: LaunchedStep
    launched_s: float


class AsyncEngine(Engine):
    """Serves requests as `Engine` does, with up to two steps in flight while `step` runs, and one between two calls.

    Its scheduler is an `AsyncScheduler`, and its executor an `AsyncExecutor`, of one process or of tensor parallel
    ranks; without stages. What is copied between the device and a store takes its turn behind the step in flight, as
    all copies do.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_flight: StepInFlight | None = None
        self._last_end_s = 0.0

    def step(self, may_hold: Callable[[], bool] | None = None) -> list[RequestOutput]:
        """Run one step and return the outputs of the requests that have any; see `Engine`."""
        outputs = super().step(may_hold)
        self._finish_when_idle()
        return outputs

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in any state, and free its memory; see `Engine`."""
        output = super().abort_request(request_id)
        self._finish_when_idle()
        return output

    def close(self) -> None:
        """Wait for the step in flight, then close all parts; see `Engine`."""
        in_flight, self._in_flight = self._in_flight, None
        try:
            if in_flight is not None:
                in_flight.step.result()  # nobody reads it
        except WorkerError:
            self._early_ends.num_failed_steps += 1  # then nothing is saved
        finally:
            super().close()

    def _step(self) -> list[RequestOutput]:
        if self.adapters is not None:
            self.adapters.free_unused()
        scheduler = cast(AsyncScheduler, self.scheduler)
        present, self._in_flight = self._in_flight, None
        if present is None:
            present = self._begin()
        if present is None:
            self.num_steps += 1
            failed = self._end_without_blocks()
            if self._disk_prefetch is not None and not failed:
                self._disk_prefetch.wait()
            return failed
        if not present.step.has_failed:
            self._begin_loads()
            ahead = scheduler.plan_ahead(self.num_steps, present.plan)
            if ahead is not None:
                self._in_flight = self._launch(ahead)
        failed = self._end_without_blocks() + self._read(present)
        if self._in_flight is None and scheduler.draws_on_device:
            # The device computes while outputs are made of what was read.
            self._in_flight = self._begin()
        return failed

    def _begin(self) -> StepInFlight | None:
        """Plan and launch a step while none is in flight; return None where nothing can run."""
        self._begin_loads()
        plan = self.scheduler.plan(self.num_steps)
        return self._launch(plan) if plan.items else None

    def _begin_loads(self) -> None:
        """Let blocks be loaded for the next plan."""
        if self._disk_prefetch is not None:
            self._disk_prefetch.begin_step(self.step_recorder.tokens_per_s)

    def _launch(self, plan: StepPlan) -> StepInFlight:
        self.num_steps += 1
        if not isinstance(plan.items, DecodeItems):
            self._mark_scheduled(plan)
        started_s = self._clock()
        return StepInFlight(plan, cast(AsyncExecutor, self.executor).launch(plan), started_s)

    def _read(self, present: StepInFlight) -> list[RequestOutput]:
        """Wait for a step, and apply its results; return the outputs of the requests that it ended early."""
        plan = present.plan
        try:
            result = present.step.result()
        except WorkerError as error:
            if self.ranks is not None:
                raise  # the other ranks are in the middle of the step
            return self._fail(plan, error)
        finally:
            # Steps run one after the other: this one had the device to itself from the end of the last one on.
            overlaps = present.launched_s < self._last_end_s or self._in_flight is not None
            started_s = max(present.launched_s, self._last_end_s)
            self._last_end_s = self._clock()
        self._early_ends.num_failed_steps = 0
        # Tokens that were computed of sequences that had ended are not counted.
        items: Sequence[ScheduledSequence] = plan.items
        if not isinstance(items, DecodeItems) or not self.scheduler.sequences.keys() >= set(items.seq_ids):
            items = [item for item in items if item.seq_id in self.scheduler.sequences]
        if items:
            elapsed_s = self._last_end_s - started_s
            self._stats.computed_tokens += self.step_recorder.record_step(items, elapsed_s, overlaps=overlaps)
        failed = [] if isinstance(result.items, DecodeResults) else self._check_items(plan, result)
        failed += self._update(plan, result)
        if self._disk_prefetch is not None:
            self._disk_prefetch.write_through(self.executor)
        return failed

    def _fail(self, plan: StepPlan, error: WorkerError) -> list[RequestOutput]:
        """End the requests of a failed step; those of the step launched after it, which read what it wrote, go back."""
        outputs = self._early_ends.fail_step(plan, error)
        later, self._in_flight = self._in_flight, None
        if later is not None:
            with suppress(WorkerError):  # its results mean nothing
                later.step.result()
            self._early_ends.withdraw_step(later.plan)
        if self._disk_prefetch is not None:
            for failed in (plan,) if later is None else (plan, later.plan):
                self._disk_prefetch.drop(failed.ops)
        return outputs

    def _finish_when_idle(self) -> None:
        """Read a step that runs for sequences that have ended, where nothing else is to be done."""
        if self._in_flight is not None and not self.has_unfinished:
            present, self._in_flight = self._in_flight, None
            self._read(present)
            self.publish_kv_events()
