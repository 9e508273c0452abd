"""Wrappers of an engine's components, for measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from quire.execution.runners.executor import Executor
from quire.models.modules.decoder import Decoder
from quire.ops.interface.ops import Ops
from quire.scheduling.scheduler import Scheduler


def _unwrapped(part: Any) -> Any:
    return part


class Wrappers(NamedTuple):
    """Functions from a component of the engine, as built, to the wrapped one that the engine uses.

    Args:
        ops: wrapper of the model's kernels.
        decoder: wrapper of the model.
        scheduler: wrapper of the scheduler.
        executor: wrapper of the executor.
    """

    ops: Callable[[Ops], Ops] = _unwrapped
    decoder: Callable[[Decoder], Decoder] = _unwrapped
    scheduler: Callable[[Scheduler], Scheduler] = _unwrapped
    executor: Callable[[Executor], Executor] = _unwrapped
