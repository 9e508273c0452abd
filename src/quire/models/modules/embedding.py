"""The token embedding, which may share its matrix with the output head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.models.modules.projections import Projection
from quire.models.modules.weight_slots import WeightSlot
from quire.models.specs.sharding import Share
from quire.models.specs.spec import ModelSpec
from quire.ops.interface.ops import KeepsRows, Ops
from quire.ops.interface.quantized_weight import StoredWeight


class TokenEmbedding:
    """The embedding matrix; with a tied head, also the head's weight."""

    look_up: Callable[[Tensor], Tensor]

    def __init__(self, spec: ModelSpec, head: Projection, ops: Ops, num_rows: int | None = None) -> None:
        self._head, self._is_tied, self._ops = head, spec.tied_head, ops
        self.slot = WeightSlot((num_rows or spec.vocab_size, spec.width), self._fill, self._fill_stored)

    def _fill(self, tensor: Tensor) -> None:
        """Take the matrix for look-ups and a tied head: one packed copy for both if rows can be read from it."""
        if self._is_tied:
            self._head.slots["weight"].fill(tensor)
            if isinstance(self._head.run, KeepsRows):
                self.look_up = self._head.run.rows
                return
        self.look_up = partial(self._ops.embedding, weight=tensor.clone())

    def _fill_stored(self, weight: StoredWeight) -> None:
        """Take a stored quantised matrix: rows are read from the packed weight, which a tied head shares."""
        fill_head = self._head.slots["weight"].fill_stored
        if self._is_tied and fill_head is not None:
            fill_head(weight)
        linear = self._head.run if self._is_tied else self._ops.pack_linear(weight)
        assert isinstance(linear, KeepsRows)
        self.look_up = linear.rows


class RowsOfRanks:
    """A look-up in a matrix whose rows are divided among ranks."""

    def __init__(self, look_up: Callable[[Tensor], Tensor], vocab_size: int, ranks: RankGroup) -> None:
        self._look_up, self._ranks = look_up, ranks
        self._first, self._end = Share(ranks.rank, ranks.size).vocabulary(vocab_size)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids` [T], summed over the ranks: a rank without a row adds zeros."""
        is_here = (ids >= self._first) & (ids < self._end)
        rows = self._look_up((ids - self._first).clamp_(0, self._end - self._first - 1))
        return self._ranks.all_reduce(torch.where(is_here[:, None], rows, 0.0))
