"""The experts of a layer as one native call: routing, the matmuls of the selected experts, and their weighted sum.

A step of one row runs two small matmuls per selected expert. As separate calls, most of the time of such a step was
overhead: Python calls, output tensors, and the torch operators that select experts and group rows.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.ops.cpu.native_layer_calls import experts_call
from quire.ops.cpu.native_library import TYPES, NativeLibrary
from quire.ops.interface.fused_layers import RoutedExperts


class NativeExperts:
    """The experts of a layer whose matmuls are all native kernels."""

    def __init__(self, library: NativeLibrary, experts: RoutedExperts) -> None:
        self._run = library.experts
        self._experts = experts  # the structure points into their tensors
        self._call = experts_call(experts)

    def __call__(self, x: Tensor, routed: Tensor, start: Tensor | None) -> Tensor:
        """Run the experts; see `FusedExperts`."""
        output = torch.empty_like(x)
        self._run(
            TYPES[x.dtype],
            ctypes.byref(self._call),
            len(x),
            x.data_ptr(),
            routed.data_ptr(),
            None if start is None else start.data_ptr(),
            output.data_ptr(),
        )
        return output
