"""Operations of encoders by torch operators: layer norm, activations, and bidirectional attention over ragged rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface.ops import Elementwise, Rotation
from quire.ops.pytorch import torch_rows

# Queries that are computed at once with a window: they share a band of keys, which is masked for each query.
WINDOW_ROWS = 256

ACTIVATIONS: Mapping[Elementwise, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square_(),
    "silu": functional.silu,
    "tanh": torch.tanh,
}


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise rows [T, E]; see `Ops.layer_norm`."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def activate(x: Tensor, activation: Elementwise) -> Tensor:
    """Apply an activation to each value."""
    return ACTIVATIONS[activation](x)


def ragged_attention(
    qkv: Tensor,
    num_heads: int,
    row_starts: Sequence[int],
    rotation: Rotation | None,
    window: int | None,
    distance_bias: Tensor | None = None,
) -> Tensor:
    """Attend sequence by sequence; see `Ops.ragged_attention`."""
    num_rows, width = qkv.shape[0], qkv.shape[1] // 3
    q, k, v = qkv.view(num_rows, 3, num_heads, width // num_heads).unbind(1)
    if rotation is not None:
        q, k = (torch_rows.rotary(part, *rotation) for part in (q, k))
    output = q.new_empty(num_rows, num_heads, width // num_heads)
    for start, end in pairwise(row_starts):
        if distance_bias is not None:
            _attend_with_bias(q[start:end], k[start:end], v[start:end], distance_bias, output[start:end])
            continue
        if window is None or end - start <= window + 1:
            _attend(q[start:end], k[start:end], v[start:end], None, output[start:end])
            continue
        for first in range(start, end, WINDOW_ROWS):
            rows, keys = slice(first, min(first + WINDOW_ROWS, end)), slice(*_band(first, start, end, window))
            distances = _positions(rows, q)[:, None] - _positions(keys, q)
            _attend(q[rows], k[keys], v[keys], distances.abs() <= window, output[rows])
    return output.flatten(1)


def _attend_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, output: Tensor) -> None:
    """Attend with addends by distance, [H, 2 R + 1].

    With queries in reverse order, the addends of the next row begin one distance later. So those of all rows are a view
    of the distances that occur, and no matrix of the text's length squared is made for each head.
    """
    length, middle = len(q), bias.shape[1] // 2
    addends = bias[:, middle - length + 1 : middle + length].unfold(1, length, 1)
    reversed_output = torch.empty_like(output)
    _attend(q.flip(0), k, v, addends.unsqueeze(0), reversed_output)
    output.copy_(reversed_output.flip(0))


def _band(first: int, start: int, end: int, window: int) -> tuple[int, int]:
    """Return the keys in `[start, end)` that the rows `[first, first + WINDOW_ROWS)` see."""
    return max(first - window, start), min(first + WINDOW_ROWS + window, end)


def _positions(rows: slice, like: Tensor) -> Tensor:
    return torch.arange(rows.start, rows.stop, device=like.device)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, output: Tensor) -> None:
    """Write the attention of queries [Q, H, D] over keys and values [K, H, D] to `output` [Q, H, D]."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    output.copy_(functional.scaled_dot_product_attention(q, k, v, mask)[0].transpose(0, 1))
