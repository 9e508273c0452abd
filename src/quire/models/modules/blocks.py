"""The blocks that a decoder is built of. They know shapes and numbers, no family."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.models.modules.norms import JointNorms, scale_slot, unit_scale
from quire.models.modules.projections import Projection, ResidualAdd, ResidualProjection
from quire.models.modules.weight_slots import AdaptedRows, WeightSlot, WeightSlots, nested
from quire.models.specs import spec
from quire.models.specs.parameter_counts import DOWN_GROUP
from quire.models.specs.rotations import Rope
from quire.ops.interface.fused_layers import PackedAttention, PackedMLP
from quire.ops.interface.ops import AttentionBatch, HeadNorms, Ops, Rotation, StateBatch, StepAttention
from quire.ops.interface.quantized_weight import StoredWeight


class SelectedRows(NamedTuple):
    """Rows whose output is needed; a mixer stores the keys, values and states of all rows.

    Args:
        rows: [R] of int64, rising.
        inputs: inputs of attention if these were all rows of the step; None without rows, and for other mixers.
    """

    rows: Tensor
    inputs: Any


class OutputRows(NamedTuple):
    """The rows of a step whose hidden states are needed, if not all: the last rows of some sequences.

    Args:
        rows: [R] of int64, rising; there may be none.
        positions: [R] of int64.
        groups: the step's part in each cache group if these were all its rows.
    """

    rows: Tensor
    positions: Tensor
    groups: Sequence[AttentionBatch | StateBatch]


class AttentionInputs(NamedTuple):
    """The inputs of attention in a step, besides its rows.

    Args:
        rotation: cosines and sines of the rows' positions.
        step: the step's attention over the block's cache group.
        query_scales: factors of the rows' queries, [T, 1, 1] of float32, if there are any.
    """

    rotation: Rotation
    step: StepAttention
    query_scales: Tensor | None


def _stored_heads(attention: spec.Attention, qkv: WeightSlots, gate: WeightSlots) -> WeightSlots:
    """Return slots that split a stored weight into heads and their gates, and reorder heads for the rotation."""
    order = turning_order(attention.rope, attention.head_dim)
    if order is None and not gate:
        return qkv
    num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    num_query_parts = 2 if gate else 1
    keys_start = num_query_parts * num_heads
    rows = torch.arange((keys_start + 2 * num_kv_heads) * head_dim).view(-1, head_dim)
    queries, keys, values = rows.tensor_split((keys_start, keys_start + num_kv_heads))
    turning = torch.cat((queries[::num_query_parts], keys))
    qkv_rows = torch.cat((turning if order is None else turning[:, order], values)).flatten()
    gate_rows = queries[1::2].flatten()

    def fill(name: str, tensor: Tensor) -> None:
        qkv[name].fill(tensor[qkv_rows])
        if gate:
            gate[name].fill(tensor[gate_rows])

    def fill_stored(name: str, weight: StoredWeight) -> None:
        for slots, part in ((qkv, qkv_rows), *(((gate, gate_rows),) if gate else ())):
            slot = slots[name]
            assert slot.fill_stored is not None
            slot.fill_stored(weight.rows(part))

    def adapted(name: str) -> tuple[AdaptedRows, ...]:
        parts = ((qkv, qkv_rows), *(((gate, gate_rows),) if gate else ()))
        return tuple(AdaptedRows(entry.projection, part) for slots, part in parts for entry in slots[name].adapted)

    return {
        name: WeightSlot(
            (rows.numel(), *slot.shape[1:]),
            partial(fill, name),
            None if slot.fill_stored is None else partial(fill_stored, name),
            adapted=adapted(name),
        )
        for name, slot in qkv.items()
    }


class AttentionBlock:
    """Grouped-query attention through the paged cache."""

    def __init__(
        self,
        attention: spec.Attention,
        width: int,
        layer_idx: int,
        addition: ResidualAdd,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self._score_scale, self._soft_cap = _score_scale(attention), attention.soft_cap
        self._layer_idx, self._num_heads = layer_idx, num_heads
        self._sigmoid_gate = ops.sigmoid_gate
        self._qkv = Projection(width, (num_heads + 2 * num_kv_heads) * head_dim, attention.qkv_bias, ops)
        self._output = ResidualProjection(num_heads * head_dim, width, attention.output_bias, addition, ops)
        self._gate: Projection | None = None
        if attention.output_gate:
            self._gate = Projection(width, num_heads * head_dim, attention.qkv_bias, ops)
        qkv_slots = _stored_heads(attention, self._qkv.slots, {} if self._gate is None else self._gate.slots)
        self.slots = nested(qkv=qkv_slots, output=self._output.slots)
        self._sinks: Tensor | None = None
        if attention.sinks:
            self.slots["sinks.weight"] = WeightSlot((num_heads,), self._fill_sinks, dtype=torch.float32)
        self._norms: HeadNorms | None = None
        self._joint_norms: JointNorms | None = None
        if attention.qk_norm is not None and attention.joint_qk_norm:
            order = turning_order(attention.rope, head_dim)
            heads = num_heads, num_kv_heads, head_dim
            self._joint_norms = JointNorms(attention.qk_norm, heads, order, ops, dtype, device, addition.ranks)
            self.slots |= self._joint_norms.slots
        elif attention.qk_norm is not None:
            norm, num_normed = attention.qk_norm, num_heads + num_kv_heads * (2 if attention.value_norm else 1)
            scales = unit_scale(norm, (num_normed, head_dim), dtype, device)
            self._norms = HeadNorms(scales, norm.eps)
            if norm.learned:
                q_scales, k_scales, _ = scales.tensor_split((num_heads, num_heads + num_kv_heads))
                order = turning_order(attention.rope, head_dim)
                self.slots["q_norm.weight"] = scale_slot(norm, q_scales, (head_dim,), order)
                self.slots["k_norm.weight"] = scale_slot(norm, k_scales, (head_dim,), order)

    def _fill_sinks(self, tensor: Tensor) -> None:
        self._sinks = tensor.clone()

    @property
    def packed(self) -> PackedAttention | None:
        """Weights for the fused kernels; None if the block has parts that they lack."""
        output, gate = self._output.plain, None if self._gate is None else self._gate.run
        if output is None or self._joint_norms is not None:
            return None
        scores = self._score_scale, self._sinks, gate, self._soft_cap
        return PackedAttention(self._qkv.run, output, self._norms, self._num_heads, *scores)

    def __call__(
        self, x: Tensor, residual: Tensor, inputs: AttentionInputs, selected: SelectedRows | None = None
    ) -> Tensor:
        """Add the attention of `x` [T, E] over the rows' sequences to `residual`; keys and values are stored."""
        rotation, step, query_scales = inputs
        qkv = self._qkv.run(x)
        if self._joint_norms is not None:
            self._joint_norms(qkv)
        q = step.prepare(self._layer_idx, qkv, self._norms, rotation)
        del qkv  # its memory is for what follows
        if selected is not None:
            if not len(residual):
                return residual
            x, q = (part.index_select(0, selected.rows) for part in (x, q))
            _, step, query_scales = selected.inputs
        if query_scales is not None:
            q.mul_(query_scales)
        gathered = step.attend(self._layer_idx, q, self._score_scale, self._sinks, self._soft_cap)
        if self._gate is not None:
            gathered = self._sigmoid_gate(gathered, self._gate.run(x))
        return self._output(gathered, residual)


class SharedAttentionBlock:
    """Grouped-query attention over the keys and values that an earlier layer has stored."""

    packed = None

    def __init__(
        self,
        attention: spec.Attention,
        width: int,
        layer_idx: int,
        addition: ResidualAdd,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert not attention.output_gate, "what reads another's keys has no gates"
        assert turning_order(attention.rope, attention.head_dim) is None, "nor heads in another order"
        assert attention.temperature is None, "nor a temperature"
        assert not attention.sinks, "nor sinks"
        assert attention.soft_cap is None, "nor a soft cap of scores"
        assert not attention.joint_qk_norm, "nor norms of all heads"
        num_heads, head_dim = attention.num_heads, attention.head_dim
        self._score_scale = _score_scale(attention)
        self._layer_idx = layer_idx
        self._q = Projection(width, num_heads * head_dim, attention.qkv_bias, ops)
        self._output = ResidualProjection(num_heads * head_dim, width, attention.output_bias, addition, ops)
        self.slots = nested(q=self._q.slots, output=self._output.slots)
        self._norms: HeadNorms | None = None
        if attention.qk_norm is not None:
            assert attention.qk_norm.learned, "nor norms without scales"
            scales = unit_scale(attention.qk_norm, (num_heads, head_dim), dtype, device)
            self._norms = HeadNorms(scales, attention.qk_norm.eps)
            self.slots["q_norm.weight"] = scale_slot(attention.qk_norm, scales, (head_dim,))

    def __call__(
        self, x: Tensor, residual: Tensor, inputs: AttentionInputs, selected: SelectedRows | None = None
    ) -> Tensor:
        """Add the attention of `x` [T, E] over the rows' sequences to `residual` [T, E]."""
        if selected is not None:
            if not len(residual):
                return residual
            x, inputs = x.index_select(0, selected.rows), selected.inputs
        q = inputs.step.prepare_queries(self._q.run(x), self._norms, inputs.rotation)
        return self._output(inputs.step.attend(self._layer_idx, q, self._score_scale), residual)


def _score_scale(attention: spec.Attention) -> float:
    return attention.head_dim**-0.5 if attention.score_scale is None else attention.score_scale


class LearnedScale:
    """Multiplication by one learned number."""

    __slots__ = ("_scale", "slots")

    def __init__(self) -> None:
        self._scale = 1.0
        self.slots: WeightSlots = {"weight": WeightSlot((1,), self._fill)}

    def _fill(self, tensor: Tensor) -> None:
        self._scale = tensor.item()

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` [T, E], scaled."""
        return x * self._scale


class GatedMLPBlock:
    """A gated two-layer perceptron."""

    def __init__(self, mlp: spec.GatedMLP, width: int, addition: ResidualAdd, ops: Ops) -> None:
        # A gate is changed between the product and the activation, which are then two calls.
        self._is_changed = mlp.gate_scale != 1.0 or mlp.cutoff is not None
        gate = None if self._is_changed else mlp.activation
        self._gate_up = Projection(width, 2 * mlp.width, mlp.bias, ops, gate=gate)
        self._down = ResidualProjection(mlp.width, width, mlp.bias, addition, ops, max_group=DOWN_GROUP)
        self._gate = ops.gate
        self._mlp = mlp
        self.slots = nested(gate_up=self._gate_up.slots, down=self._down.slots)

    @property
    def packed(self) -> PackedMLP | None:
        """Weights for the fused kernels; None if the block has parts that they lack."""
        down = self._down.plain
        return None if down is None or self._is_changed else PackedMLP(self._gate_up.run, down)

    @property
    def is_adapted(self) -> bool:
        """True if an adapter of the current step applies to one of the two layers."""
        return self._gate_up.is_adapted or self._down.is_adapted

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the perceptron's output for `x` [T, E], added to `residual` [T, E] if there is one."""
        product, mlp = self._gate_up.run(x), self._mlp
        if self._is_changed:
            gates = product[:, : mlp.width]
            gates.mul_(mlp.gate_scale)
            if mlp.cutoff is not None:
                deviation, mean = torch.std_mean(gates, -1, correction=0, keepdim=True)
                gates.sub_(mean + deviation * mlp.cutoff).relu_()
            product = self._gate(product, mlp.activation)
        return self._down(product, residual)


class PlainMLPBlock:
    """A two-layer perceptron without gates."""

    packed = None

    def __init__(self, mlp: spec.PlainMLP, width: int, addition: ResidualAdd, ops: Ops) -> None:
        self._up = Projection(width, mlp.width, mlp.bias, ops)
        self._down = ResidualProjection(mlp.width, width, mlp.bias, addition, ops, max_group=DOWN_GROUP)
        self._activate = partial(ops.activate, activation=mlp.activation)
        self.slots = nested(up=self._up.slots, down=self._down.slots)

    @property
    def is_adapted(self) -> bool:
        """True if an adapter of the current step applies to one of the two layers."""
        return self._up.is_adapted or self._down.is_adapted

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the perceptron's output for `x` [T, E], added to `residual` [T, E] if there is one."""
        return self._down(self._activate(self._up.run(x)), residual)


def turning_order(rope: Rope | None, head_dim: int) -> Tensor | None:
    """Return the order of a head's values if the rotated pairs are not its two halves; None for their stored order.

    Kernels rotate the first half of a head with its second half. Scores and norms do not change as long as queries and
    keys have the same order. If only the first part of a head is rotated:

    ```
     stored     | rotated, half 0 | rotated, half 1 | fixed, half 0   | fixed, half 1   |
     in memory  | rotated, half 0 | fixed, half 0   | rotated, half 1 | fixed, half 1   |
    ```

    If neighbours are the rotated pairs, half 0 has the even positions of the part, half 1 the odd ones.
    """
    if rope is None or (rope.num_turned is None and not rope.interleaved):
        return None
    turns, stays = torch.arange(head_dim).tensor_split((rope.num_turned or head_dim,))
    halves = turns.view(-1, 2).T if rope.interleaved else turns.view(2, -1)
    return torch.cat((halves, stays.view(2, -1)), 1).flatten()
