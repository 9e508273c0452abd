"""The experts of a layer as one native call: routing, the products of the chosen experts, and their weighted sum.

A step of one row runs two small products for each expert that it goes through. Most of the time of such a step was
their caller's: calls, tensors to write to, and the torch operators that choose experts and bring rows together.
"""

from __future__ import annotations

import ctypes
from itertools import chain

import torch
from torch import Tensor

from quire.ops.fused_layers import RoutedExperts
from quire.ops.interface import Linear
from quire.ops.native_library import TYPES, ExpertCall, ExpertsCall, LinearCall, NativeLibrary
from quire.ops.native_linear import NativeLinear


class NativeExperts:
    """The experts of a layer whose products are all native kernels.

    Args:
        library: library of the kernels.
        experts: experts whose layers are `NativeLinear`.
    """

    def __init__(self, library: NativeLibrary, experts: RoutedExperts) -> None:
        self._run = library.experts
        self._experts = experts  # the structure points into their tensors
        parts = [ExpertCall(_call(up), _call(down)) for up, down in zip(experts.gate_ups, experts.downs, strict=True)]
        shared = experts.shared
        self._call = ExpertsCall(
            router=_call(experts.router),
            choice_bias=_pointer(experts.choice_bias),
            expert_scales=_pointer(experts.expert_scales),
            experts=(ExpertCall * len(parts))(*parts),
            num_experts=len(parts),
            num_chosen=experts.num_chosen,
            is_sigmoid=experts.is_sigmoid,
            is_renormalised=experts.renormalised,
            is_input_scaled=experts.scaled_input,
            sum_eps=experts.sum_eps,
            score_scale=experts.score_scale,
            logit_scale=experts.logit_scale,
            shared=ExpertCall() if shared is None else ExpertCall(_call(shared.gate_up), _call(shared.down)),
            shared_gate=LinearCall() if experts.shared_gate is None else _call(experts.shared_gate),
        )

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


def can_fuse_experts(experts: RoutedExperts) -> bool:
    """Return whether all products are native."""
    others = [experts.router, *(experts.shared or ()), *([experts.shared_gate] if experts.shared_gate else ())]
    return all(isinstance(part, NativeLinear) for part in chain(experts.gate_ups, experts.downs, others))


def _call(linear: Linear) -> LinearCall:
    assert isinstance(linear, NativeLinear)
    return linear.as_call()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
