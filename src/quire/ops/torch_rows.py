"""What is done to each row between the matrix products, from stock operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface import Activation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of [..., D]; the scale is apart, for it comes after the cast to its dtype.

    Args:
        weight: anything that broadcasts against `x`.
    """
    return torch.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps).mul_(weight).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head of [T, H, D]: add the swapped halves, times the sines."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Activate the gates, then multiply in place."""
    gates, ups = gate_up.chunk(2, -1)
    activated = functional.silu(gates) if activation == "silu" else functional.gelu(gates, approximate="tanh")
    return activated.mul_(ups)


def gated_norm(x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gate [T, F], then normalise and scale each of the G parts of a row; `weight` is [G, F / G]."""
    parts = functional.silu(gates.float()).mul_(x).reshape(len(x), *weight.shape)
    return rms_norm(parts, weight, eps).flatten(1).to(gates.dtype)
