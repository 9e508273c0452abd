"""Operators that a backend leaves to torch: embedding look-ups, and the operators of encoders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.interface.ops import Elementwise, Rotation
from quire.ops.pytorch.torch_ops import TorchOps


class TorchFallback:
    """Base of backends that leave these operators to torch."""

    def __init__(self, device: torch.device) -> None:
        self._torch = TorchOps(device)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Look up rows."""
        return self._torch.embedding(ids, weight)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Normalise rows."""
        return self._torch.layer_norm(x, weight, bias, eps)

    def activate(self, x: Tensor, activation: Elementwise) -> Tensor:
        """Apply an activation to each value."""
        return self._torch.activate(x, activation)

    def ragged_attention(
        self,
        qkv: Tensor,
        num_heads: int,
        row_starts: Sequence[int],
        rotation: Rotation | None,
        window: int | None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        """Attend sequence by sequence."""
        return self._torch.ragged_attention(qkv, num_heads, row_starts, rotation, window, distance_bias)
