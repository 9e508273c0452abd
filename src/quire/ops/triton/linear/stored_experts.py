"""One linear layer of all experts of an MoE block as a grouped GEMM, with quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.ops import Activation, Linear
from quire.ops.layers.gated import GatedLinear
from quire.ops.triton.kernels import stored_experts as kernels
from quire.ops.triton.launches import is_aligned
from quire.ops.triton.linear.expert_rows import RowGroups
from quire.ops.triton.linear.stored_linear import PackedCodes, RoundedRows, TritonQuantizedLinear

COLUMNS: Final = 64


class ExpertCodes(NamedTuple):
    """Some columns of the layer of all experts, of one form.

    Args:
        first: codes of the first expert; the codes of the others have the same form, shapes and dtypes.
        columns: range of these columns in the layer.
        codes, scales, mins, zero_points, biases: int64 [X], pointers to the tensors of each expert; 0 for a tensor that
            does not exist.
    """

    first: PackedCodes
    columns: slice
    codes: Tensor
    scales: Tensor
    mins: Tensor
    zero_points: Tensor
    biases: Tensor

    @classmethod
    def of(cls, parts: Sequence[PackedCodes], columns: slice, biases: Sequence[Tensor | None]) -> ExpertCodes:
        """Return columns of all experts; each of `biases` is the bias of a whole layer, or None."""
        device = parts[0].codes.device
        own_biases = [None if bias is None else bias[columns] for bias in biases]
        fields = zip(*((part.codes, part.scales, part.mins, part.zero_points) for part in parts), strict=True)
        return cls(parts[0], columns, *(_addresses(tensors, device) for tensors in (*fields, own_biases)))


class StoredExpertLayer:
    """A layer of all experts: one launch for each form of its columns, usually one."""

    def __init__(self, layers: Sequence[TritonQuantizedLinear], activation: Activation | None) -> None:
        self.activation = activation
        self._layers = layers
        self._parts: list[ExpertCodes] = []
        biases, start = [layer.bias for layer in layers], 0
        for parts in zip(*(layer.parts for layer in layers), strict=True):
            columns = slice(start, start + parts[0].codes.shape[1])
            self._parts.append(ExpertCodes.of(parts, columns, biases))
            start = columns.stop
        self._num_columns = start

    def multiply(self, x: Tensor, groups: RowGroups, *, is_first: bool, scales_input: bool) -> Tensor:
        """Multiply grouped rows by their experts; see `GroupedLinear`."""
        gathers = is_first
        if is_first and scales_input:
            # A row is multiplied by its score before it is quantised, so it differs for each of its experts.
            x, gathers = x[groups.row_ids] * groups.scores[:, None].to(x.dtype), False
        x = x if x.stride(1) == 1 else x.contiguous()
        dtype = x.dtype if is_first else torch.float32
        output = torch.empty(len(groups.row_ids), self._num_columns, dtype=dtype, device=x.device)
        rounded = self._layers[0].round_for_parts(x)
        for part in self._parts:
            rows = rounded[part.first.rounded_group]
            self._launch(part, output, x, rows, groups, gathers, not is_first and not scales_input)
        return output

    def _launch(
        self,
        part: ExpertCodes,
        output: Tensor,
        x: Tensor,
        rows: RoundedRows,
        groups: RowGroups,
        gathers: bool,
        is_scored: bool,
    ) -> None:
        """Multiply by some columns; `rows` is `x` in the form that the kernel takes."""
        first, form = part.first, part.first.form
        num_columns = first.codes.shape[1]
        table, bias = self._layers[0].table_of(first), self._layers[0].bias
        kernels.multiply_stored_by_expert[groups.tiles.shape[1], -(-num_columns // COLUMNS)](
            output[:, part.columns],
            rows.x,
            groups.row_ids,
            rows.scales,
            groups.scores,
            part.codes,
            part.scales,
            part.mins,
            part.zero_points,
            part.biases,
            first.codes if table is None else table,
            x,
            first.scales,
            x if bias is None else bias,
            *groups.tiles.unbind(),
            num_columns,
            len(first.codes) // form.group,
            output.stride(0),
            rows.x.stride(0),
            NUM_EXPERTS=len(self._layers),
            GATHER=gathers,
            SCORED=is_scored,
            BIAS=bias is not None,
            **first.constants,
            ROWS=groups.tile_rows,
            COLUMNS=COLUMNS,
        )


def stored_layer(layers: Sequence[Linear]) -> StoredExpertLayer | None:
    """Return layers of experts as a grouped layer; None if they cannot be grouped.

    All layers must be quantised, have no plain parts and no input order, have the same forms, shapes and gate, and have
    aligned tensors.
    """
    activations = {layer.activation if isinstance(layer, GatedLinear) else None for layer in layers}
    inner = [layer.linear if isinstance(layer, GatedLinear) else layer for layer in layers]
    stored = [linear for linear in inner if isinstance(linear, TritonQuantizedLinear)]
    if len(stored) < len(layers) or len(activations) > 1 or len({_kind(linear) for linear in stored}) > 1:
        return None
    if not all(is_aligned(tensor) for linear in stored for part in linear.parts for tensor in _tensors(part)):
        return None
    return StoredExpertLayer(stored, activations.pop())


def _kind(layer: TritonQuantizedLinear) -> tuple[object, ...]:
    """Return the properties that all layers of one launch must have in common."""
    parts = ((part.form, part.width, part.codes.shape, part.scales.dtype) for part in layer.parts)
    return *parts, None if layer.bias is None else layer.bias.dtype


def _tensors(part: PackedCodes) -> list[Tensor]:
    tensors = (part.codes, part.scales, part.mins, part.zero_points)
    return [tensor for tensor in tensors if tensor is not None]


def _addresses(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    return torch.tensor([0 if tensor is None else tensor.data_ptr() for tensor in tensors], device=device)
