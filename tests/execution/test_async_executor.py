"""Steps that are launched and read later: what is left of one that has failed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.errors import WorkerError
from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.runners.runner import InProcessExecutor
from quire.memory.results import NO_OPS
from quire.scheduling.plan import StepPlan, StepResult


class _Fails:
    """A runner without memory for any step.

    Attributes:
        tensors: what the steps had when they failed.
    """

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[torch.Tensor]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        activations = torch.zeros(4)
        self.tensors.append(weakref.ref(activations))
        self._layer(activations + 1)
        return StepResult(plan.tick, ())

    def _layer(self, activations: torch.Tensor) -> None:
        self.tensors.append(weakref.ref(activations))
        try:
            raise torch.OutOfMemoryError("out of memory")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("a layer has failed") from error

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not asked for")


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_a_failed_step_keeps_none_of_its_memory() -> None:
    runner = _Fails()
    executor = InProcessExecutor(runner, DeferredTokens(torch.device("cpu")))
    kept = []
    for tick in range(3):
        step = executor.launch(StepPlan(tick, (), NO_OPS, ()))
        assert step.has_failed
        with pytest.raises(WorkerError, match=f"step {tick} failed in the data plane .*a layer has failed") as failed:
            step.result()
        kept.append(failed)
    assert len(runner.tensors) == 6
    assert [tensor() for tensor in runner.tensors] == [None] * 6
    assert isinstance(kept[0].value.__cause__, RuntimeError)
