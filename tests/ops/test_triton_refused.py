"""Triton's kernels are refused where they cannot compute; the tests of what they compute are in `tests/ops/triton`."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from quire import LLM
from quire.errors import ConfigError
from quire.ops import choose_kernels, make_ops

CPU = torch.device("cpu")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"Triton cannot be imported .*; install quire\[gpu\]") as caught:
        make_ops(CPU, "triton")
    assert caught.value.field == "kernels"


def test_with_what_it_does_not_have() -> None:
    with pytest.raises(ConfigError, match="weight_packing 'lossless' is for weights as they came") as caught:
        make_ops(CPU, "triton", "int8", weight_packing="lossless")
    assert caught.value.field == "weight_packing"
    with pytest.raises(ConfigError, match="deterministic needs native kernels") as caught:
        make_ops(CPU, "triton", deterministic=True)
    assert caught.value.field == "deterministic"


@pytest.mark.parametrize(
    ("capability", "has_triton", "expected"),
    [((9, 0), True, "triton"), ((7, 5), True, "torch"), ((9, 0), False, "torch")],
)
def test_a_gpu_takes_them_where_they_run(
    capability: tuple[int, int], has_triton: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs) if has_triton else None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    cuda = torch.device("cuda")
    assert choose_kernels(cuda, "auto") == expected
    assert choose_kernels(cuda, "torch") == "torch"
    assert choose_kernels(CPU, "auto") == "auto"
    knobs.runtime.interpret = True
    assert choose_kernels(cuda, "auto") == "torch"


def test_captured_steps_without_them() -> None:
    with pytest.raises(
        ConfigError, match="cudagraph_capture_sizes needs kernels 'triton', got kernels 'auto'"
    ) as caught:
        LLM("bundled", device="cpu", cudagraph_capture_sizes=(1, 2))
    assert caught.value.field == "cudagraph_capture_sizes"
