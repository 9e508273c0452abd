"""The experts of a layer by one launch for each of their two products, without a wait for how many rows each has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.fused_layers import RoutedExperts
from quire.ops.interface import Activation, Linear
from quire.ops.triton.kernels import experts as kernels
from quire.ops.triton.plain_linear import TritonLinear

COLUMNS: Final = 64
INPUTS: Final = 64
FEW_ROWS: Final = 16
MANY_ROWS: Final = 64


class ExpertWeights(NamedTuple):
    """The weights of one layer of all experts.

    Args:
        layers: layers, which hold the tensors.
        weights, biases: int64 [X], addresses of the tensors; zeros without biases.
        num_columns: number of rows of a weight.
    """

    layers: Sequence[TritonLinear]
    weights: Tensor
    biases: Tensor
    num_columns: int

    @classmethod
    def of(cls, layers: Sequence[TritonLinear]) -> ExpertWeights:
        """Return the weights of layers of equal shapes."""
        device = layers[0].weight.device
        addresses = [layer.weight.data_ptr() for layer in layers]
        biases = [0 if layer.bias is None else layer.bias.data_ptr() for layer in layers]
        return cls(
            layers,
            torch.tensor(addresses, device=device),
            torch.tensor(biases, device=device),
            layers[0].weight.shape[0],
        )


class RowGroups(NamedTuple):
    """The rows of a step, once for each expert that they go through, grouped by expert.

    Args:
        row_ids: int32, row of the step.
        scores: float32, score of the expert.
        places: int64 [T, C], where a row is in its groups.
        tiles: int32 [3, tiles], for each tile of rows its expert, its first row and the end of the expert's rows; the
            expert of a tile that is not needed is X.
        tile_rows: number of rows of a tile.
    """

    row_ids: Tensor
    scores: Tensor
    places: Tensor
    tiles: Tensor
    tile_rows: int


class TritonExperts:
    """The experts of a layer whose weights are plain.

    Args:
        experts: experts whose layers are `TritonLinear`.
        gate: `Ops.gate` of the backend.
    """

    def __init__(self, experts: RoutedExperts, gate: Callable[[Tensor, Activation], Tensor]) -> None:
        self._experts, self._gate = experts, gate
        self._gate_ups, self._downs = (ExpertWeights.of(_plain(each)) for each in (experts.gate_ups, experts.downs))

    def __call__(self, x: Tensor, routed: Tensor, start: Tensor | None) -> Tensor:
        """Run the experts; see `FusedExperts`."""
        experts = self._experts
        total = self._begin(x, start)
        if not len(x):
            return total.to(x.dtype)
        chosen, scores = choose(experts.router(routed), experts)
        groups = group_rows(chosen, scores, len(experts.downs))
        inner = self._multiply(self._gate_ups, x, groups, is_first=True)
        activation = self._gate_ups.layers[0].activation
        given = self._multiply(
            self._downs, inner if activation is None else self._gate(inner, activation), groups, is_first=False
        )
        # Rows are added in the order of their experts' scores, whatever rows are beside them.
        for place in groups.places.unbind(1):
            total += given[place]
        return total.to(x.dtype)

    def _begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Return the float32 sums that experts add to: `start`, and the shared expert's output."""
        shared, gate = self._experts.shared, self._experts.shared_gate
        if shared is not None and gate is None:
            return shared.down(shared.gate_up(x), start).float()
        total = torch.zeros_like(x, dtype=torch.float32) if start is None else start.to(torch.float32, copy=True)
        if shared is not None and gate is not None:
            total.addcmul_(gate(x).float().sigmoid_(), shared.down(shared.gate_up(x)).float())
        return total

    def _multiply(self, layer: ExpertWeights, x: Tensor, groups: RowGroups, *, is_first: bool) -> Tensor:
        """Multiply grouped rows by their experts: the rows of a step first, then what came of that, in float32."""
        num_columns, width = layer.num_columns, x.shape[1]
        dtype = x.dtype if is_first else torch.float32
        output = torch.empty(len(groups.row_ids), num_columns, dtype=dtype, device=x.device)
        scales_input = self._experts.scaled_input
        kernels.multiply_by_expert[groups.tiles.shape[1], -(-num_columns // COLUMNS)](
            output,
            x,
            groups.row_ids,
            groups.scores,
            layer.weights,
            layer.biases,
            *groups.tiles.unbind(),
            num_columns,
            width,
            x.stride(0),
            NUM_EXPERTS=len(layer.layers),
            GATHER=is_first,
            SCALE_INPUT=is_first and scales_input,
            SCALE_OUTPUT=not is_first and not scales_input,
            BIAS=layer.layers[0].bias is not None,
            ROWS=groups.tile_rows,
            COLUMNS=COLUMNS,
            INPUTS=INPUTS,
        )
        return output


def can_group(experts: RoutedExperts) -> bool:
    """Return whether all layers of the experts are plain, and alike, and all of the experts are here."""
    if len(experts.gate_ups) < experts.num_experts:
        return False
    for layers in (experts.gate_ups, experts.downs):
        plain = _plain(layers)
        if len(plain) < len(layers) or len({(each.weight.shape, each.weight.dtype) for each in plain}) > 1:
            return False
    return True


def _plain(layers: Sequence[Linear]) -> list[TritonLinear]:
    return [layer for layer in layers if isinstance(layer, TritonLinear)]


def choose(logits: Tensor, experts: RoutedExperts) -> tuple[Tensor, Tensor]:
    """Return the experts of each row and their scores, [T, C] of int64 and of float32."""
    logits = logits.float() * experts.logit_scale
    bias = experts.choice_bias
    scores = logits.sigmoid() if experts.is_sigmoid else logits.softmax(-1)
    chosen = (logits if bias is None else scores + bias).topk(experts.num_chosen, -1).indices
    scores = scores.gather(-1, chosen)
    if experts.renormalised:
        scores /= scores.sum(-1, keepdim=True) + experts.sum_eps
    scores = scores * experts.score_scale
    return chosen, scores if experts.expert_scales is None else scores * experts.expert_scales[chosen]


def group_rows(chosen: Tensor, scores: Tensor, num_experts: int) -> RowGroups:
    """Group rows by expert, all on the device: how many rows an expert has, the host does not learn."""
    num_rows, num_chosen = chosen.shape
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0)
    tile_rows = FEW_ROWS if num_rows * num_chosen <= FEW_ROWS * num_experts else MANY_ROWS
    tile_counts = (counts + tile_rows - 1) // tile_rows
    tile_ends = tile_counts.cumsum(0)
    # As many tiles as there can be: each expert may leave one that is not full.
    num_tiles = min(-(-len(flat) // tile_rows) + num_experts, len(flat))
    tiles = torch.arange(num_tiles, device=flat.device)
    experts = torch.searchsorted(tile_ends, tiles, right=True)
    known = experts.clamp(max=num_experts - 1)
    first = (ends - counts)[known] + (tiles - (tile_ends - tile_counts)[known]) * tile_rows
    numbers = torch.stack((experts, first, ends[known])).int()
    return RowGroups((order // num_chosen).int(), scores.flatten()[order], places.view_as(chosen), numbers, tile_rows)
