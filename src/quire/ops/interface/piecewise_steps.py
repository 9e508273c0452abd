"""Piecewise captured steps: the layers between token mixers are captured, and the mixers are launched eagerly.

In a step with prompts, the work of attention and of recurrent layers is planned by the host and differs from step to
step. All other operations depend only on the number of rows, so they are captured for some numbers of rows, with static
memory at the seams, as in vLLM's piecewise CUDA graphs:

```
 captured piece | attend | captured piece | attend | ... | captured piece
   writes queries -> reads; writes output -> reads
```
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.ops.interface.ops import AttentionBatch, HeadNorms, Rotation, StateBatch, StepAttention
from quire.ops.interface.recurrent_weights import GatedDeltaNetWeights, Mamba2Weights, ShortConvWeights

# A splitting operation: called with the step's attention, or recurrence, and its number of rows.
SplitOp = Callable[[Any, int], None]


class SeamMemory:
    """Static memory at the seams of pieces; layers with tensors of equal shape share it, as they run one by one.

    Args:
        num_rows: maximum number of rows of a step.
        device: device of the memory.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows, self._device = num_rows, device
        self._tensors: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def take(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Return [num_rows, num_columns], the same memory for equal name, columns and dtype; initially zeros."""
        key = name, num_columns, dtype
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(self._num_rows, num_columns, dtype=dtype, device=self._device)
        return self._tensors[key][:num_rows]


@dataclass(frozen=True, slots=True)
class PiecewiseAttentionBatch(AttentionBatch):
    """Rows of a captured piece; only `slot_mapping` of the base class's fields has a meaning.

    Args:
        seams: memory at the seams.
        split: ends a piece before a splitting operation, and begins the next one after it.
    """

    seams: SeamMemory | None = None
    split: Callable[[SplitOp], None] | None = None


@dataclass(frozen=True, slots=True)
class PiecewiseStateBatch(StateBatch):
    """Rows of a captured piece; the fields of the base class have no meaning.

    Args:
        seams, split: see `PiecewiseAttentionBatch`.
    """

    seams: SeamMemory | None = None
    split: Callable[[SplitOp], None] | None = None


@runtime_checkable
class AttendsInto(Protocol):
    """Attention of a step that writes to a given output."""

    def attend_into(
        self, output: Tensor, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None, soft_cap: float | None
    ) -> None:
        """Write the result of `StepAttention.attend` to `output`, [T, H * D], contiguous."""


class PiecewiseAttention:
    """Attention of a captured piece: all but `attend` is in the piece; see `StepAttention`."""

    def __init__(self, inner: StepAttention, batch: PiecewiseAttentionBatch) -> None:
        assert batch.seams is not None
        assert batch.split is not None
        self._inner, self._seams, self._split = inner, batch.seams, batch.split

    def prepare(self, layer_idx: int, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm heads, rotate queries and keys, store keys and values; return the queries [T, H, D]."""
        return self._inner.prepare(layer_idx, qkv, norms, rotation)

    def prepare_queries(self, q: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm and rotate queries; return them as [T, H, D]."""
        return self._inner.prepare_queries(q, norms, rotation)

    def attend(
        self, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Split here; return [T, H * D], whose real rows (without padding) the operation between the pieces writes."""
        num_rows, num_heads, head_dim = q.shape
        queries = self._seams.take("queries", num_rows, num_heads * head_dim, q.dtype).view(q.shape)
        queries.copy_(q)
        output = self._seams.take("attended", num_rows, num_heads * head_dim, q.dtype)
        self._split(partial(_attend, (layer_idx, scale, sinks, soft_cap), queries, output))
        return output


def _attend(
    options: tuple[int, float, Tensor | None, float | None], queries: Tensor, output: Tensor, step: Any, num_rows: int
) -> None:
    layer_idx, scale, sinks, soft_cap = options
    if isinstance(step, AttendsInto):
        step.attend_into(output[:num_rows], layer_idx, queries[:num_rows], scale, sinks, soft_cap)
    else:
        output[:num_rows].copy_(step.attend(layer_idx, queries[:num_rows], scale, sinks, soft_cap))


class PiecewiseStates:
    """Recurrence of a captured piece: the pieces are split at each mixer; see `StepStates`."""

    def __init__(self, batch: PiecewiseStateBatch) -> None:
        assert batch.seams is not None
        assert batch.split is not None
        self._seams, self._split = batch.seams, batch.split

    def short_conv(self, layer_idx: int, projected: Tensor, weights: ShortConvWeights) -> Tensor:
        """Split here."""
        return self._mix("short_conv", layer_idx, projected, weights, weights.taps.shape[1])

    def gated_delta_net(self, layer_idx: int, projected: Tensor, weights: GatedDeltaNetWeights) -> Tensor:
        """Split here."""
        num_columns = len(weights.A) * len(weights.norm_scales)
        return self._mix("gated_delta_net", layer_idx, projected, weights, num_columns)

    def mamba2(self, layer_idx: int, projected: Tensor, weights: Mamba2Weights) -> Tensor:
        """Split here."""
        return self._mix("mamba2", layer_idx, projected, weights, weights.taps.shape[1] - 2 * weights.written)

    def _mix(self, name: str, layer_idx: int, projected: Tensor, weights: Any, num_columns: int) -> Tensor:
        """Return the results of a mixer, whose real rows the operation between the pieces writes."""
        inputs = self._seams.take("projected", len(projected), projected.shape[1], projected.dtype)
        inputs.copy_(projected)
        output = self._seams.take("mixed", len(projected), num_columns, projected.dtype)
        self._split(partial(_mix, name, layer_idx, inputs, weights, output))
        return output


def _mix(name: str, layer_idx: int, inputs: Tensor, weights: Any, output: Tensor, step: Any, num_rows: int) -> None:
    output[:num_rows].copy_(getattr(step, name)(layer_idx, inputs[:num_rows], weights))
