"""The executor of rank 0: each step runs here while the other ranks run it too."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from quire.distributed.ranks import Ranks
from quire.errors import RankFailed
from quire.execution.runners.executor import Executor
from quire.memory.results import MemoryOps
from quire.scheduling.plan import LaunchedStep, StepPlan, StepResult


class RankedExecutor:
    """Runs steps on rank 0; any failure in a step ends the engine, since the other ranks are running it.

    Args:
        inner: executor of this rank's part.
        ranks: all ranks.
        cores: cores that the thread of the steps is bound to; empty to leave it unbound.
        close_log: function that tells the other ranks that no step follows.
    """

    def __init__(
        self, inner: Executor, ranks: Ranks, cores: Sequence[int] = (), close_log: Callable[[], None] | None = None
    ) -> None:
        self._inner, self._ranks, self._cores, self._close_log = inner, ranks, cores, close_log
        self._bound: tuple[int, set[int]] | None = None

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step; see `Executor`.

        Raises:
            RankFailed: a rank has failed; no step can run any more.
            LockstepDrift: a rank has planned another step.
        """
        with self._watched():
            step = self._inner.launch(plan)
            if step.has_failed:
                step.result()
        return LaunchedStep(lambda: self._read(step))

    def _read(self, step: LaunchedStep) -> StepResult:
        """Wait for a step; see `launch`."""
        with self._watched():
            return step.result()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Return a context of a part of a step, in which the end of any rank is an error."""
        if self._cores:
            self._bind()
        try:
            self._ranks.links.check()
            with self._ranks.group.watched():
                yield
            # If a rank has failed meanwhile, a device's wait may have ended without a result.
            self._ranks.links.check()
        except BaseException as error:
            raise self.failure_of(error) from error

    def _bind(self) -> None:
        """Bind this thread, and threads that it starts, to the rank's cores; other threads stay unbound."""
        self._bound = threading.get_native_id(), os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        self._cores = ()

    def _unbind(self) -> None:
        """Restore the thread's previous cores, which the ranks of its next engine inherit."""
        if self._bound is not None:
            thread_id, cores = self._bound
            with suppress(OSError):  # it may have ended
                os.sched_setaffinity(thread_id, cores)

    def failure_of(self, error: BaseException) -> BaseException:
        """End the ranks, and return their error; an interruption that is no `Exception` is returned itself."""
        failure = self._ranks.cause_of(_cause(error))
        return failure if isinstance(error, Exception) else error

    def measure_copies(self) -> float | None:
        """See `Executor`."""
        return self._inner.measure_copies()

    def move(self, ops: MemoryOps) -> None:
        """See `Executor`; it moves this rank's parts of blocks, and the other ranks move theirs."""
        self._inner.move(ops)

    def close(self) -> None:
        """Let the other ranks end; the inner executor and the ranks are closed by their owner."""
        try:
            if self._close_log is not None and self._ranks.failure is None:
                self._ranks.expect_end()
                self._close_log()
        except RankFailed as error:
            self._ranks.fail(error)
        finally:
            self._unbind()


def _cause(error: BaseException) -> BaseException:
    """Return the `RankFailed` among an error's causes; the error itself if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RankFailed):
        cause = cause.__cause__
    return error if cause is None else cause
