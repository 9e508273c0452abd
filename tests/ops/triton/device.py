"""Where the backend is tested: in Triton's interpreter, or on a GPU; see CONTRIBUTING.md for how its tests run."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.ops import world

triton = pytest.importorskip("triton")

from quire.ops.triton.triton_ops import TritonOps  # noqa: E402 - it needs Triton

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
# Where kernels run, and what they are given lies. The interpreter has the first word: it interprets for any device.
DEVICE = "cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu"
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(
        DEVICE == "cpu" and not IS_INTERPRETED, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1 for the interpreter"
    ),
    # The interpreter computes with numpy, which warns where masked lanes divide by zero or overflow.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # Triton 3.9, where it compiles, says that a later one will no longer join products and sums by itself.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]
# Tests of what there is in the interpreter only.
INTERPRETED_MARKS = [*MARKS, pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")]

# The same numbers on every device.
randn = partial(world.randn, device=DEVICE)
make_world = partial(world.World, device=DEVICE)


def make_ops() -> TritonOps:
    """Return the backend, which plans for the processors of its device."""
    return TritonOps(torch.device(DEVICE))
