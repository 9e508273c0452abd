"""The experts of each row of a step, and the rows of each expert; all on the device, which nobody waits for."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.fused_layers import RoutedExperts

FEW_ROWS: Final = 16
MANY_ROWS: Final = 64


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
