"""Every backend that can compute here, for tests that compare each with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from quire.config import Quantization
from quire.ops.cpu.native_library import LEVELS, NativeLibrary, runnable_libraries
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.ops import Ops
from quire.ops.pytorch.torch_ops import TorchOps


@dataclass(frozen=True)
class Backend:
    """What computes, and where its tensors lie."""

    device: str
    make: Callable[..., Ops]


def make_native(level: str, path: Path, quantization: Quantization | None = None) -> Ops:
    return NativeOps(NativeLibrary(level, path), quantization)


def make_torch(device: str, quantization: Quantization | None = None) -> Ops:
    return TorchOps(torch.device(device), quantization=quantization)


LIBRARIES = runnable_libraries()
NATIVE = [
    pytest.param(Backend("cpu", partial(make_native, level, LIBRARIES[level])), id=level)
    if level in LIBRARIES
    else pytest.param(None, id=level, marks=pytest.mark.skip(reason=f"no {level} kernels were built for this CPU"))
    for level in LEVELS
]
TORCH = pytest.param(Backend("cpu", partial(make_torch, "cpu")), id="torch")
CPU_BACKENDS = [TORCH, *NATIVE]
TORCH_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = [
    TORCH,
    pytest.param(Backend("cuda", partial(make_torch, "cuda")), id="cuda", marks=pytest.mark.gpu),
    *NATIVE,
]
