"""Routing: the experts of each row of a step, and the rows of each expert; on the device, without synchronisation."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.fused_layers import RoutedExperts

FEW_ROWS: Final = 16
MANY_ROWS: Final = 64


class RowGroups(NamedTuple):
    """The rows of a step, each repeated for each of its C experts, sorted by expert.

    Args:
        row_ids: int32 [T * C], row of the step.
        scores: float32 [T * C], routing weight of the row's expert.
        places: int64 [T, C], indices of each row's copies among the grouped rows.
        tiles: int32 [3, tiles]: for each tile of rows, its expert, its first row and the end of the expert's rows; the
            expert of an unused tile is X.
        tile_rows: number of rows of a tile.
        is_last_absent: bool [], True if some rows are routed to experts of other ranks. All of their copies have the
            index of the last grouped row, for which nothing is computed. None if all experts are on this rank.
    """

    row_ids: Tensor
    scores: Tensor
    places: Tensor
    tiles: Tensor
    tile_rows: int
    is_last_absent: Tensor | None


def choose(logits: Tensor, experts: RoutedExperts) -> tuple[Tensor, Tensor]:
    """Return the top-k experts of each row and their routing weights, [T, C] of int64 and of float32."""
    logits = logits.float() * experts.logit_scale
    bias = experts.choice_bias
    scores = logits.sigmoid() if experts.is_sigmoid else logits.softmax(-1)
    chosen = (logits if bias is None else scores + bias).topk(experts.num_chosen, -1).indices
    scores = scores.gather(-1, chosen)
    if experts.renormalised:
        scores /= scores.sum(-1, keepdim=True) + experts.sum_eps
    scores = scores * experts.score_scale
    return chosen, scores if experts.expert_scales is None else scores * experts.expert_scales[chosen]


def group_rows(chosen: Tensor, scores: Tensor, num_experts: int, local_experts: range | None = None) -> RowGroups:
    """Sort rows by expert on the device: the number of rows per expert is not copied to the host."""
    num_rows, num_chosen = chosen.shape
    num_local = num_experts if local_experts is None else len(local_experts)
    flat, is_local = chosen.flatten(), None
    if local_experts is not None and num_local < num_experts:
        flat = flat - local_experts.start
        is_local = (flat >= 0) & (flat < num_local)
        flat = flat.where(is_local, num_local)  # after the rows of all experts of this rank
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_local]
    ends = counts.cumsum(0)
    tile_rows = FEW_ROWS if num_rows * num_chosen <= FEW_ROWS * num_experts else MANY_ROWS
    tile_counts = (counts + tile_rows - 1) // tile_rows
    tile_ends = tile_counts.cumsum(0)
    # An upper bound on the number of tiles: each expert may have one that is not full.
    num_tiles = min(-(-len(flat) // tile_rows) + num_local, len(flat))
    tiles = torch.arange(num_tiles, device=flat.device)
    idxs = torch.searchsorted(tile_ends, tiles, right=True)
    expert_idxs = idxs.clamp(max=num_local - 1)
    first = (ends - counts)[expert_idxs] + (tiles - (tile_ends - tile_counts)[expert_idxs]) * tile_rows
    numbers = torch.stack((idxs, first, ends[expert_idxs])).int()
    is_last_absent = None
    if is_local is not None:
        places, is_last_absent = places.where(is_local, len(flat) - 1), ends[-1] < len(flat)
    places = places.view_as(chosen)
    return RowGroups((order // num_chosen).int(), scores.flatten()[order], places, numbers, tile_rows, is_last_absent)
