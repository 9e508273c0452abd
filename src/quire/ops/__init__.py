"""The kernels, and which of them compute."""

from __future__ import annotations

import torch

from quire.config import Quantization
from quire.errors import ConfigError
from quire.ops.interface import Ops
from quire.ops.native_library import find_library
from quire.ops.native_ops import NativeOps
from quire.ops.torch_ops import TorchOps


def make_ops(device: torch.device, kernels: str = "auto", quantization: Quantization | None = None) -> Ops:
    """Make the backend that computes on a device.

    Args:
        device: any that torch has.
        kernels: "torch" for stock operators, "native" for what the package's own build compiled, "auto" for the
            latter on a CPU where there is such.
        quantization: what the weights of linear layers are rounded to; on a CPU only.

    Raises:
        ConfigError: native kernels or rounded weights were asked for and cannot be had; the message says why.
    """
    if quantization is not None and device.type != "cpu":
        raise ConfigError(
            f"quantization {quantization!r} is for CPUs, not for device {device.type!r}: leave it out, or set device "
            "to 'cpu'",
            field="quantization",
        )
    if kernels == "torch" or (kernels == "auto" and device.type != "cpu"):
        return TorchOps(device, quantization=quantization)
    found = find_library() if device.type == "cpu" else f"they are for CPUs, not for device {device.type!r}"
    if not isinstance(found, str):
        return NativeOps(found, quantization)
    if kernels == "native":
        raise ConfigError(f"native kernels were asked for, but {found}; use 'torch' or 'auto'", field="kernels")
    return TorchOps(device, note=f"no native kernels: {found}", quantization=quantization)
