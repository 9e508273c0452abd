"""Decisions at start on a GPU that need none: dtypes, memory of captured steps, and what `quire doctor` says."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from quire.cli.doctor_gpu import GPU, describe
from quire.config import EngineConfig, StepCost
from quire.engine.startup import model_facts
from quire.engine.startup.model_facts import dtype_for, dtype_on
from quire.errors import ConfigError
from quire.execution.capture.captured_steps import CaptureOptions
from quire.execution.profile.gpu_graph_profile import GraphBytes, GraphMemory, NumGraphs, graph_bytes
from quire.models.modules.mtp import MTPHead

BF16, FP16 = torch.bfloat16, torch.float16
OLD, NEW = (7, 5), (8, 0)


def test_bfloat16_becomes_float16_where_a_gpu_has_none(caplog: pytest.LogCaptureFixture) -> None:
    assert dtype_for(NEW, BF16, "auto") == BF16
    assert dtype_for(OLD, torch.float32, "auto") == torch.float32
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert dtype_for(OLD, BF16, "auto") == FP16
    assert "compute capability 7.5" in caplog.text
    assert dtype_on("cpu", BF16, "auto") == BF16


def test_bfloat16_that_was_asked_for_is_refused_there() -> None:
    with pytest.raises(ConfigError, match="compute capability") as caught:
        dtype_for(OLD, BF16, "bfloat16")
    assert caught.value.field == "dtype"
    assert dtype_for(NEW, BF16, "bfloat16") == BF16


def test_captured_steps_take_the_largest_and_what_the_driver_has_for_each() -> None:
    before, after = GraphMemory(free=1000, reserved=100), GraphMemory(free=800, reserved=280)
    decodes = GraphBytes.between(before, after)
    assert decodes == GraphBytes(reserved=180, driver=20)
    assert GraphBytes.between(before, before) == GraphBytes()
    # What torch had already from the driver is no new memory.
    assert GraphBytes.between(before, GraphMemory(free=1000, reserved=150)) == GraphBytes(reserved=50)
    assert graph_bytes(decodes, decodes, NumGraphs(10, 1, 0)) == 180 + 20 * 10
    assert graph_bytes(decodes, decodes, NumGraphs(15, 2, 0)) == 180 + 150
    # Pieces lie in the memory of decodes, as far as that goes.
    assert graph_bytes(decodes, GraphBytes(200, 50), NumGraphs(10, 1, 3)) == 200 + 20 * 10 + 30 * 3
    assert graph_bytes(GraphBytes(), GraphBytes(90, 30), NumGraphs(0, 0, 3)) == 90 + 30 * 3


@pytest.mark.parametrize(("most", "expected"), [(1, (1,)), (3, (1, 2, 4)), (4, (1, 2, 4)), (9, (1, 2, 4, 8))])
def test_passes_of_a_draft_model_have_rows_for_sequences_only(most: int, expected: tuple[int, ...]) -> None:
    assert CaptureOptions((1, 2, 4, 8), 100, (64,), most).of_draft() == CaptureOptions(expected, 100, makes_drafts=True)


@pytest.mark.parametrize(("ranks", "expected"), [(None, [(1, 2, 4, 8), (1, 2, 4)]), ("ranks", [(1, 2, 4, 8)])])
def test_captured_passes_of_a_head_are_counted_where_there_are_any(
    ranks: str | None, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of the target come first; where ranks share it, passes of the head are launched."""
    captured = list[Any]()

    def measure(_model: Any, options: CaptureOptions, *_: Any) -> int:
        captured.append(options.sizes)
        return 100

    monkeypatch.setattr(model_facts, "measure_graph_bytes", measure)
    monkeypatch.setattr(model_facts, "measure_step_cost", lambda *_: StepCost(fixed_bytes=1000))
    target = Mock(dtype=BF16, **{"spec.max_position": 512})
    head = Mock(spec=MTPHead, dtype=BF16, ranks=ranks, replicas=None)
    options: dict[str, Any] = {"cudagraph_capture_sizes": (1, 2, 4, 8), "speculative_method": "mtp"}
    config = EngineConfig.from_options(model="any", kernels="triton", max_num_seqs=3, **options)
    cost = model_facts.step_cost(config, target, head, "cuda", "bfloat16")
    assert captured == expected
    assert cost.fixed_bytes == 1000 + 100 * len(expected)


@pytest.mark.parametrize(
    ("gpu", "wrong"),
    [
        (GPU("H100", (9, 0), 132, 80 << 30, 79 << 30, "3.9.0"), set()),
        (GPU("H100", (9, 0), 132, 80 << 30, 20 << 30, "3.9.0"), {"GPU memory"}),
        (GPU("T4", (7, 5), 40, 16 << 30, 15 << 30, None), {"GPU dtypes", "GPU kernels"}),
        (GPU("H100", (9, 0), 132, 80 << 30, 79 << 30, "3.9.0", True), {"GPU kernels"}),
    ],
)
def test_what_doctor_says(gpu: GPU, wrong: set[str]) -> None:
    found = describe(gpu)
    assert {name for name, is_right, _, _ in found if not is_right} == wrong
    assert found[0][2].startswith(f"{gpu.name}, compute capability {gpu.capability[0]}")
    kernels = found[-1]
    assert ("captured" in kernels[2]) == ("GPU kernels" not in wrong)
    assert bool(kernels[3]) == ("GPU kernels" in wrong)
