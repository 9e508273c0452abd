"""The backend in Triton's interpreter; see CONTRIBUTING.md for how its tests run."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.ops.triton.triton_ops import TritonOps  # noqa: E402 - it needs Triton

# The interpreter computes with numpy, which warns where masked lanes divide by zero or overflow.
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def make_ops() -> TritonOps:
    return TritonOps(torch.device("cpu"))
