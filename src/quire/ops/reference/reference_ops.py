"""The slow twin of every backend: each operation written as its definition, in float32, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quire.config import Quantization
from quire.ops.interface.lora import TorchLoraLayer
from quire.ops.interface.ops import (
    LEAST_SCALED,
    SWIGLUOAI_ALPHA,
    SWIGLUOAI_LIMIT,
    Activation,
    AttentionBatch,
    Elementwise,
    HeadNorms,
    Linear,
    PagedKV,
    PagedStates,
    Rotation,
    StateBatch,
)
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.interface.weight_formats import weight_format
from quire.ops.layers.gated import GatedLinear
from quire.ops.layers.joined import pack_joined
from quire.ops.layers.reordered import ReorderedLinear
from quire.ops.pytorch.recurrent_mixers import RecurrentMixers
from quire.ops.reference.reference_encoder import activate, layer_norm, ragged_attention
from quire.ops.reference.reference_quantised import ReferenceQuantisedLinear, ReferenceStoredLinear, round_weight
from quire.ops.reference.reference_states import ReferenceStepStates


class ReferenceOps:
    """The operations by their definitions; backends are tested against them."""

    name = "reference"

    def __init__(self, quantization: Quantization | None = None) -> None:
        self._quantization = quantization

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,
    ) -> Linear:
        """Copy the weight, or quantise it."""
        if gate is not None:
            return GatedLinear(self.pack_linear(weight, bias, min_bits, max_group=max_group), self.gate, gate)
        if isinstance(weight, StoredWeight):
            if weight.input_order is not None:
                return ReorderedLinear(self.pack_linear(weight.in_own_order(), bias), weight.input_order)
            if weight.has_plain:
                return pack_joined(partial(self.pack_linear, min_bits=min_bits, max_group=max_group), weight, bias)
            return ReferenceStoredLinear(weight, bias)
        chosen = weight_format(self._quantization, min_bits, max_group)
        if chosen is None:
            return ReferenceLinear(weight.clone(), bias)
        return ReferenceQuantisedLinear(round_weight(weight, chosen), bias)

    def make_lora(self, num_columns: int, max_rank: int | None = None) -> TorchLoraLayer:  # noqa: ARG002 (nothing is captured)
        """Multiply by each adapter in turn."""
        return TorchLoraLayer(num_columns)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Stack the rows one by one."""
        return torch.stack([weight[token_id] for token_id in ids.tolist()])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise in float32, cast to the weight's dtype, scale."""
        return rms_norm(x, weight, eps)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Gate in float32."""
        gates, ups = gate_up.float().chunk(2, -1)
        if activation == "silu":
            factor = torch.sigmoid(gates)
        elif activation == "swigluoai":
            gates = gates.clamp(max=SWIGLUOAI_LIMIT)
            factor = torch.sigmoid(SWIGLUOAI_ALPHA * gates)
            ups = ups.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT) + 1.0
        else:
            factor = 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gates + 0.044715 * gates**3)))
        return (gates * factor * ups).to(gate_up.dtype)

    def sigmoid_gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """Round the sigmoids, and multiply."""
        return x * torch.sigmoid(gates.float()).to(gates.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Normalise in float32."""
        return layer_norm(x, weight, bias, eps)

    def activate(self, x: Tensor, activation: Elementwise) -> Tensor:
        """Apply the definition in float32."""
        return activate(x, activation)

    def ragged_attention(
        self,
        qkv: Tensor,
        num_heads: int,
        row_starts: Sequence[int],
        rotation: Rotation | None,
        window: int | None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        """Attend row by row."""
        if rotation is not None:
            heads = qkv.view(len(qkv), 3 * num_heads, -1)
            turned = rotary(heads[:, : 2 * num_heads], rotation)
            qkv = torch.cat((turned, heads[:, 2 * num_heads :]), 1).flatten(1)
        return ragged_attention(qkv, num_heads, row_starts, window, distance_bias)

    def gated_norm(self, x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Gate and normalise in float32, part by part."""
        parts = (x * gates.float() * torch.sigmoid(gates.float())).chunk(len(weight), -1)
        return torch.cat([rms_norm(part, scale, eps) for part, scale in zip(parts, weight, strict=True)], -1).to(
            gates.dtype
        )

    def apply_token_bitmask(self, logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
        """Look at the bits one by one."""
        for row, mask in zip(rows, masks, strict=True):
            words = mask.tolist()
            for token_id in range(logits.shape[1]):
                if not words[token_id // 32] >> token_id % 32 & 1:
                    logits[row, token_id] = -torch.inf

    def step_attention(self, batch: AttentionBatch, kv: PagedKV) -> ReferenceStepAttention:
        """Keep the batch; nothing is precomputed."""
        return ReferenceStepAttention(batch, kv)

    def step_states(self, batch: StateBatch, states: PagedStates) -> RecurrentMixers:
        """Keep the batch; nothing is precomputed."""
        return RecurrentMixers(ReferenceStepStates(batch, states), self)


class ReferenceLinear:
    """A matmul in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply, add, cast once."""
        y = x.float() @ self._weight.float().T
        if self._bias is not None:
            y = y + self._bias.float()
        if residual is not None:
            y = y + residual.float()
        return y.to(x.dtype)


class ReferenceStepAttention:
    """Attention read token by token from block tables."""

    def __init__(self, batch: AttentionBatch, kv: PagedKV) -> None:
        self._batch = batch
        self._data = kv.data
        self._head_dim = kv.head_dim

    def prepare(self, layer_idx: int, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm, rotate, then store one slot after the other."""
        num_kv_heads, block_size = self._data.shape[3:5]
        heads = qkv.view(len(qkv), -1, self._head_dim)
        if norms is not None:
            num_normed = len(norms.scales)
            normed = rms_norm(heads[:, :num_normed], norms.scales, norms.eps)
            heads = torch.cat((normed, heads[:, num_normed:]), 1)
        qk, v = rotary(heads[:, :-num_kv_heads], rotation), heads[:, -num_kv_heads:]
        for row, slot in enumerate(self._batch.slot_mapping.tolist()):
            block_id, offset = divmod(slot, block_size)
            for head in range(num_kv_heads):
                for kv, vector in enumerate((qk[row, head - num_kv_heads], v[row, head])):
                    self._data[block_id, layer_idx, kv, head, offset] = stored(vector, self._data.dtype)
        return qk[:, :-num_kv_heads]

    def prepare_queries(self, q: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm, then rotate."""
        heads = q.view(len(q), -1, self._head_dim)
        return rotary(heads if norms is None else rms_norm(heads, norms.scales, norms.eps), rotation)

    def attend(
        self, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Compute the attention of one row after the other."""
        batch = self._batch
        outputs = []
        for seq in range(len(batch.context_lens)):
            table = batch.block_ids[batch.block_starts[seq] : batch.block_starts[seq + 1]].tolist()
            first, last = batch.row_starts[seq], batch.row_starts[seq + 1]
            for row in range(first, last):
                end = batch.context_lens[seq] - (last - 1 - row)
                seen = range(batch.first_seen(end - 1), end)
                outputs.append(self._attend_row(layer_idx, q[row], table, seen, scale, sinks, soft_cap))
        return torch.stack(outputs).to(q.dtype)

    def _attend_row(
        self,
        layer_idx: int,
        q: Tensor,
        table: list[int],
        seen: range,
        scale: float,
        sinks: Tensor | None,
        soft_cap: float | None,
    ) -> Tensor:
        """Attend with one row's queries [H, D]; return [H * D] in float32."""
        num_kv_heads, block_size = self._data.shape[3:5]
        group = q.shape[0] // num_kv_heads
        places = [(table[position // block_size], position % block_size) for position in seen]
        slots = torch.stack([self._data[block_id, layer_idx, :, :, offset] for block_id, offset in places])
        keys, values = restored(slots, self._head_dim).repeat_interleave(group, dim=2).unbind(1)  # [seen, H, D] each
        scores = torch.einsum("hd,thd->ht", q.float(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            weights = torch.cat((scores, sinks[:, None]), 1).softmax(-1)[:, :-1]
        return torch.einsum("ht,thd->hd", weights, values).flatten()


def stored(vector: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a vector [D] in the storage format of a slot, [W]; see `PagedKV`."""
    wide = vector.float()
    if dtype == torch.float8_e4m3fn:
        return wide.clamp(-448.0, 448.0).to(dtype)
    if dtype != torch.int8:
        return vector.to(dtype)
    reach = wide.abs().max()
    # A GPU divides by a host scalar by multiplying with its reciprocal, which may be off by one bit.
    scale = torch.zeros_like(reach) if reach <= LEAST_SCALED else reach / torch.full_like(reach, 127.0)
    values = torch.zeros_like(wide) if scale == 0.0 else (wide / scale).round().nan_to_num(0.0)
    return torch.cat((values.to(torch.int8), scale.view(1).view(torch.int8)))


def restored(slots: Tensor, head_dim: int) -> Tensor:
    """Return the vectors [..., D] that slots [..., W] hold, in float32."""
    if slots.dtype != torch.int8:
        return slots.float()
    return slots[..., :head_dim].float() * slots[..., head_dim:].contiguous().view(torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in float32, cast to the weight's dtype, scale, cast to the dtype of `x`."""
    wide = x.float()
    return ((wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(weight.dtype) * weight).to(x.dtype)


def rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (first half, second half) of [T, H, D] by its angle."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    cosine, sine = rotation.cos[..., :half].float(), rotation.sin[..., half:].float()
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(x.dtype)
