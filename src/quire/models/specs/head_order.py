"""The order in which the values of a head lie in memory, so that rotation turns its two halves."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.specs.rotations import Rope


def turning_order(rope: Rope | None, head_dim: int) -> Tensor | None:
    """Return the order in which a head's values lie where not just its halves turn; None for their own order.

    Kernels turn the halves of whole heads against each other. Scores and norms see no difference, as long as queries
    and keys lie alike. Where only a first part of a head turns:

    ```
     a head     | turns, half 0 | turns, half 1 | stays, half 0 | stays, half 1 |
     its order  | turns, half 0 | stays, half 0 | turns, half 1 | stays, half 1 |
    ```

    Where neighbours turn against each other, half 0 is every second value of the part, half 1 those between.
    """
    if rope is None or (rope.num_turned is None and not rope.interleaved):
        return None
    turns, stays = torch.arange(head_dim).tensor_split((rope.num_turned or head_dim,))
    halves = turns.view(-1, 2).T if rope.interleaved else turns.view(2, -1)
    return torch.cat((halves, stays.view(2, -1)), 1).flatten()
