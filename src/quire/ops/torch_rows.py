"""What is done to each row between the matrix products, from stock operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of [..., D]; the scale is apart, for it comes after the cast.

    Args:
        weight: anything that broadcasts against `x`.
    """
    return torch.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head of [T, H, D]: add the swapped halves, times the sines."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gate, then multiply in place."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)
