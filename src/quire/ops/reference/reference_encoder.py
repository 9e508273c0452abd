"""The operations of encoders by their definitions, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quire.ops.interface.ops import Elementwise


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Subtract the mean of rows [T, E], divide by the standard deviation, scale, add."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def activate(x: Tensor, activation: Elementwise) -> Tensor:
    """Return the activation of each value."""
    y = x.float()
    if activation == "gelu":
        y = 0.5 * y * (1.0 + torch.erf(y / math.sqrt(2.0)))
    elif activation == "gelu_tanh":
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y**3)))
    elif activation == "relu2":
        y = y.clamp(min=0.0) ** 2
    elif activation == "silu":
        y = y * torch.sigmoid(y)
    else:
        y = y.clamp(min=0.0) if activation == "relu" else torch.tanh(y)
    return y.to(x.dtype)


def ragged_attention(
    qkv: Tensor, num_heads: int, row_starts: Sequence[int], window: int | None, distance_bias: Tensor | None = None
) -> Tensor:
    """Attend row by row; queries and keys of `qkv` [T, 3 * H * D] are already rotated."""
    q, k, v = qkv.float().view(len(qkv), 3, num_heads, -1).unbind(1)
    rows = []
    for start, end in pairwise(row_starts):
        for row in range(start, end):
            first, last = (start, end) if window is None else (max(start, row - window), min(end, row + window + 1))
            scores = torch.einsum("hd,khd->hk", q[row], k[first:last]) / math.sqrt(q.shape[-1])
            if distance_bias is not None:
                middle = distance_bias.shape[1] // 2
                scores = scores + distance_bias[:, middle + first - row : middle + last - row].float()
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[first:last]).flatten())
    return torch.stack(rows).to(qkv.dtype)
