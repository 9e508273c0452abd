"""Per-layer inputs: values of each token for every layer, made once a step and added by each layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.models.modules.embedding import RowsOfRanks
from quire.models.modules.norms import LearnedNorm, Norm
from quire.models.modules.projections import Projection, ResidualAdd, ResidualProjection
from quire.models.modules.weight_slots import WeightSlot, WeightSlots, nested
from quire.models.specs import spec
from quire.models.specs.sharding import share_of
from quire.ops.interface.ops import KeepsRows, Ops
from quire.ops.interface.quantized_weight import StoredWeight


class PerLayerEmbedding:
    """Per-layer inputs: the sum of a token's row of a table and a projection of its embedding.

    Args:
        inputs: the table and the norm of what is projected.
        num_layers: L.
        width: E.
        num_tokens: tokens of the vocabulary; those without a row of the table have its first one.
        ranks: ranks that divide the table's rows among them; None for one.

    Attributes:
        slots: "embedding", "projection" and "norm".
    """

    def __init__(
        self,
        inputs: spec.PerLayerInputs,
        num_layers: int,
        width: int,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        num_tokens: int,
        ranks: RankGroup | None = None,
    ) -> None:
        self._has_all = inputs.vocab_size >= num_tokens
        self._shape = num_layers, inputs.width
        self._ops, self._ranks, self._vocab_size = ops, ranks, inputs.vocab_size
        self._look_up: Callable[[Tensor], Tensor]
        self._table_scale = torch.tensor(inputs.width**0.5, dtype=dtype).item()
        self._projection = Projection(width, num_layers * inputs.width, False, ops)
        self._projection_scale = width**-0.5
        self._norm = Norm(inputs.norm, inputs.width, ops, dtype, device)
        first, end = share_of(ranks).vocabulary(inputs.vocab_size)
        shape = end - first, num_layers * inputs.width
        table = WeightSlot(shape, self._fill_table, self._fill_stored_table)
        self.slots = nested(embedding={"weight": table}, projection=self._projection.slots, norm=self._norm.slots)

    def _fill_table(self, tensor: Tensor) -> None:
        self._put(partial(self._ops.embedding, weight=tensor.clone()))

    def _fill_stored_table(self, weight: StoredWeight) -> None:
        table = self._ops.pack_linear(weight)
        assert isinstance(table, KeepsRows)
        self._put(table.rows)

    def _put(self, look_up: Callable[[Tensor], Tensor]) -> None:
        self._look_up = look_up if self._ranks is None else RowsOfRanks(look_up, self._vocab_size, self._ranks)

    def __call__(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Return the inputs of all layers, [T, L, P], for tokens [T] and embeddings `x` [T, E].

        Args:
            input_ids: [T] of int64.
            x: their embeddings, scaled, [T, E].
        """
        if not self._has_all:
            input_ids = torch.where(input_ids < self._vocab_size, input_ids, 0)
        of_token = self._look_up(input_ids) * self._table_scale
        projected = self._projection.run(x) * self._projection_scale
        normed = self._norm(projected.view(-1, self._shape[1])).view(of_token.shape)
        return ((normed + of_token) * math.sqrt(0.5)).view(-1, *self._shape)


class PerLayerGate:
    """The addition of a layer's own inputs."""

    def __init__(self, inputs: spec.PerLayerInputs, width: int, norm: LearnedNorm, ops: Ops) -> None:
        self._gates = Projection(width, inputs.width, False, ops)
        self._output = ResidualProjection(inputs.width, width, False, ResidualAdd(norm), ops)
        self._gate = ops.gate
        self._activation = inputs.activation
        self.slots: WeightSlots = nested(gate=self._gates.slots, output=self._output.slots)

    def __call__(self, x: Tensor, layer_inputs: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `residual + norm(projection(gate(x) * layer_inputs))`, [T, E].

        Args:
            x: [T, E].
            layer_inputs: [T, P].
            residual: [T, E]; None for `x`.
        """
        gated = self._gate(torch.cat((self._gates.run(x), layer_inputs), 1), self._activation)
        return self._output(gated, x if residual is None else residual)
