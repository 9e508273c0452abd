"""Attention of rows of images that see each other, also forward, in models whose texts are causal.

```
 tokens        | a  b | i0 i1 i2 i3 | c  d |
 i1 sees       | x  x | x  x  x  x  |      |      with a window of 2: i0 to i3
 c sees        | x  x | x  x  x  x  | x    |
```

The backend computes all rows as causal ones, and those of images are computed once more. A step has all rows of such an
image, so its keys and values are stored when the first of its rows is read.

Source: `token_type_ids` of transformers' Gemma 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.ops.interface.ops import AttentionBatch, HeadNorms, PagedKV, Rotation, StepAttention
from quire.ops.reference.reference_ops import restored


class JointRows(NamedTuple):
    """Rows of a step that belong to one image.

    Args:
        sequence: index of their sequence in the batch.
        first_row, end_row: rows of the batch.
        first_token: index of the first of these rows in its sequence.
        end: end of the image in its sequence; the context of the batch goes so far at least.
    """

    sequence: int
    first_row: int
    end_row: int
    first_token: int
    end: int


@dataclass(frozen=True, slots=True)
class ImageAttentionBatch(AttentionBatch):
    """The part of a step in one cache group, with rows of images that see each other.

    Args:
        images: these rows.
    """

    images: Sequence[JointRows] = ()

    @classmethod
    def of(cls, batch: AttentionBatch, images: Sequence[JointRows]) -> ImageAttentionBatch:
        """Return a batch with these rows of images."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(AttentionBatch)}, images=images)


class _Rows(NamedTuple):
    """The rows of an image, the slot rows of what they see, [2, K, tokens], and what each sees of it, or None."""

    first: int
    end: int
    slots: Tensor
    is_seen: Tensor | None


class ImageAttention:
    """A step's attention, see `StepAttention`, in which rows of images see each other.

    Args:
        causal: the backend's attention of the step.
        batch: the batch.
        kv: keys and values of the cache group.
    """

    def __init__(self, causal: StepAttention, batch: ImageAttentionBatch, kv: PagedKV) -> None:
        self._causal, self._kv = causal, kv
        self.prepare_queries = causal.prepare_queries
        self._rows = [self._rows_of(batch, image) for image in batch.images]

    def _rows_of(self, batch: ImageAttentionBatch, image: JointRows) -> _Rows:
        _, num_layers, _, num_heads, block_size, _ = self._kv.data.shape
        device = self._kv.data.device
        num_rows = image.end_row - image.first_row
        firsts = [batch.first_seen(image.first_token + idx) for idx in range(num_rows)]
        tokens = torch.arange(firsts[0], image.end, device=device)
        table = batch.block_ids[batch.block_starts[image.sequence] : batch.block_starts[image.sequence + 1]]
        heads = torch.arange(2 * num_heads, device=device).view(2, num_heads, 1)
        block_rows = table[tokens // block_size] * (num_layers * 2 * num_heads) + heads
        is_seen = None
        if firsts[-1] > firsts[0]:
            is_seen = tokens >= torch.tensor(firsts, device=device)[:, None]
        return _Rows(image.first_row, image.end_row, block_rows * block_size + tokens % block_size, is_seen)

    def prepare(self, layer_idx: int, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """See `StepAttention.prepare`."""
        return self._causal.prepare(layer_idx, qkv, norms, rotation)

    def attend(
        self, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """See `StepAttention.attend`; for models without sinks and soft caps."""
        assert sinks is None, "no model has images that see themselves, and sinks"
        assert soft_cap is None, "nor soft caps of scores"
        result = self._causal.attend(layer_idx, q, scale)
        slot_rows, head_dim = self._kv.slot_rows[layer_idx], self._kv.head_dim
        for first, end, slots, is_seen in self._rows:
            stored = slot_rows.index_select(0, slots.flatten()).view(*slots.shape, -1)
            keys, values = restored(stored, head_dim)
            queries = q[first:end].transpose(0, 1).float()
            rows = scaled_dot_product_attention(
                queries[None], keys[None], values[None], is_seen, scale=scale, enable_gqa=True
            )
            result[first:end] = rows[0].transpose(0, 1).flatten(1)
        return result
