"""Triton's kernels are refused where they cannot compute; the tests of what they compute are in `tests/ops/triton`."""

from __future__ import annotations

import sys

import pytest
import torch

from quire.errors import ConfigError
from quire.ops import make_ops

CPU = torch.device("cpu")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"Triton cannot be imported .*; install quire\[gpu\]") as caught:
        make_ops(CPU, "triton")
    assert caught.value.field == "kernels"


def test_with_what_it_does_not_have() -> None:
    with pytest.raises(ConfigError, match="quantization 'int8' is for kernels 'native' and 'torch'") as caught:
        make_ops(CPU, "triton", "int8")
    assert caught.value.field == "quantization"
    with pytest.raises(ConfigError, match="deterministic needs native kernels") as caught:
        make_ops(CPU, "triton", deterministic=True)
    assert caught.value.field == "deterministic"
