"""The embedding of tokens, whose matrix may be that of the head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from quire.models.projections import Projection
from quire.models.spec import ModelSpec
from quire.models.weight_slots import WeightSlot
from quire.ops.interface import KeepsRows, Ops
from quire.ops.quantized_weight import StoredWeight


class TokenEmbedding:
    """A matrix whose rows are looked up; of a tied head, the weight of its product too.

    Args:
        spec: specification of the model.
        head: head, whose weight is filled here where it is tied.
        ops: kernels.

    Attributes:
        look_up: function from token ids [T] to rows [T, E]; it is there once the slot is filled.
        slot: slot of the matrix.
    """

    look_up: Callable[[Tensor], Tensor]

    def __init__(self, spec: ModelSpec, head: Projection, ops: Ops) -> None:
        self._head, self._is_tied, self._ops = head, spec.tied_head, ops
        self.slot = WeightSlot((spec.vocab_size, spec.width), self._fill, self._fill_stored)

    def _fill(self, tensor: Tensor) -> None:
        """Take the matrix for look-ups and, of a tied head, for its product: packed, if rows can be had from that."""
        if self._is_tied:
            self._head.slots["weight"].fill(tensor)
            if isinstance(self._head.run, KeepsRows):
                self.look_up = self._head.run.rows
                return
        self.look_up = partial(self._ops.embedding, weight=tensor.clone())

    def _fill_stored(self, weight: StoredWeight) -> None:
        """Take a matrix that is stored quantised: rows are looked up in what is packed, for both ends if it is tied."""
        fill_head = self._head.slots["weight"].fill_stored
        if self._is_tied and fill_head is not None:
            fill_head(weight)
        linear = self._head.run if self._is_tied else self._ops.pack_linear(weight)
        assert isinstance(linear, KeepsRows)
        self.look_up = linear.rows
