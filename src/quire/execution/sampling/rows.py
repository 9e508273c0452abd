"""Orders and sums of rows of logits that do not depend on the other rows.

Logits that were computed in 16 bits have many ties, and `torch.topk` and `torch.sort` order and cut ties arbitrarily:
here the lower token id comes first among equals. Stock operators split the sum of a single long row between threads,
and add up its parts in another order: here the order is fixed.
"""

from __future__ import annotations

import torch

CHUNK = 128


def stable_topk(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` greatest logits of each row; among finite equals the lower token id comes first."""
    if count == logits.shape[1]:
        ids = ascending_order(-logits)
        return logits.gather(1, ids), ids
    values, ids = logits.topk(count + 1)
    is_tied = (values[:, 1:] == values[:, :-1]) & values[:, 1:].isfinite()
    if is_tied[:, -1].any():
        for row in is_tied[:, -1].nonzero()[:, 0].tolist():
            _cut_tie(logits[row], values[row], ids[row])
    values, ids = values[:, :-1], ids[:, :-1]
    if is_tied.any():
        ids, order = ids.sort(dim=-1)
        values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
    return values, ids


def ascending_order(values: torch.Tensor) -> torch.Tensor:
    """Return the token ids of each row by ascending value; the lower id comes first among equals.

    On CPUs 262,144 integers of one row are sorted in an eighth of the time that rows of floats take.
    """
    if values.device.type != "cpu":
        return values.argsort(dim=-1, stable=True)
    order = torch.empty_like(values, dtype=torch.int64)
    kind = torch.int64 if values.dtype == torch.float64 else torch.int32
    for row, ids in zip(values, order, strict=True):
        # Zeros of both signs become one; then the bits of negative values are in descending order.
        bits = (row + 0.0).view(kind)
        torch.argsort(torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits), stable=True, out=ids)
    return order


def _cut_tie(logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> None:
    """Keep the lowest ids of a tie that crosses the cut; `ids` [count + 1] is changed."""
    is_equal = values == values[-1]
    first = int(is_equal.nonzero()[0, 0])
    equal_ids = (logits == values[-1]).nonzero()[:, 0]
    ids[first:] = equal_ids[: len(ids) - first]


def chunk_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of each row's chunks: contiguous [R, W] to float64 [R, ceil(W / CHUNK)]."""
    num_rows, width = values.shape
    num_whole = width // CHUNK
    sums = values[:, : num_whole * CHUNK].view(num_rows, num_whole, CHUNK).sum(-1, dtype=torch.float64)
    if num_whole * CHUNK == width:
        return sums
    rest = values[:, num_whole * CHUNK :].sum(-1, keepdim=True, dtype=torch.float64)
    return torch.cat((sums, rest), dim=1)


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of rows: contiguous [R, W] to float64 [R, 1]."""
    return chunk_sums(values).cumsum(-1)[:, -1:]
