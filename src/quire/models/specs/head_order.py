"""The order of a head's values in memory, so that rotation pairs its two halves."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.specs.rotations import Rope


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
