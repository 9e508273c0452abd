"""Sums of rows in float64, which do not depend on the other rows.

Stock operators split a single long row between threads, and add up its parts in another order.
"""

from __future__ import annotations

import torch

CHUNK = 128


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
