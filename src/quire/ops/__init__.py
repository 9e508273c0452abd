"""The kernels, and the row that finds a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from quire.ops.interface import Ops
from quire.ops.torch_ops import TorchOps

# Type of device -> what computes on it.
BACKENDS: Final[dict[str, Callable[[torch.device], Ops]]] = {"cpu": TorchOps, "cuda": TorchOps}


def make_ops(device: torch.device) -> Ops:
    """Make the backend of a device."""
    return BACKENDS[device.type](device)
