"""The encoder of all families, as an `EncoderSpec` describes it: over ragged rows, without padding or a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quire.models.modules.norms import AnyNorm, make_norm
from quire.models.modules.pooled_heads import PooledHeads
from quire.models.modules.projections import Projection
from quire.models.modules.rope import RotaryEmbedding
from quire.models.modules.weight_slots import WeightSlot, WeightTable, nested
from quire.models.specs.encoder_spec import EncoderLayer, EncoderMLP, EncoderSpec
from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.parameter_estimate import DOWN_GROUP
from quire.ops.interface.ops import Ops, Rotation


class TextRows(NamedTuple):
    """The rows of a step: whole texts, one after the other.

    Args:
        input_ids: [T] of int64.
        row_starts: S + 1 numbers; text `s` owns rows `[row_starts[s], row_starts[s + 1])`, never none.
        second_starts: position of the first token of a pair's second text, for each text; None for one text.
    """

    input_ids: Tensor
    row_starts: Sequence[int]
    second_starts: Sequence[int | None]

    @property
    def positions(self) -> Tensor:
        """The position of each row in its text, [T] of int64."""
        ranges = (range(end - start) for start, end in pairwise(self.row_starts))
        return torch.tensor(list(chain.from_iterable(ranges)), device=self.input_ids.device)

    @property
    def token_types(self) -> Tensor:
        """1 for the rows of second texts, 0 for others, [T] of int64."""
        types = torch.zeros_like(self.input_ids)
        for second, (start, end) in zip(self.second_starts, pairwise(self.row_starts), strict=True):
            if second is not None:
                types[start + second : end] = 1
        return types


class Encoder:
    """A bidirectional encoder. It holds no state of a step. Call it under `torch.inference_mode()`.

    Args:
        spec: specification of the model.
        ops: kernels.
        dtype: dtype of weights and hidden states.

    Attributes:
        spec, dtype, device: the arguments of these names.
        heads: layers over pooled hidden states.
        weights: the weights to load; the encoder runs when none is missing.
    """

    def __init__(self, spec: EncoderSpec, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self._ops = ops
        new_norm = partial(make_norm, width=spec.width, ops=ops, dtype=dtype, device=device)
        self._tables: dict[str, Tensor] = {}
        tables = {"embedding": spec.vocab_size, "positions": spec.num_positions, "token_types": spec.num_token_types}
        slots = {
            f"{name}.weight": WeightSlot((num_rows, spec.width), partial(self._fill_table, name))
            for name, num_rows in tables.items()
            if num_rows
        }
        self._embedding_norm, self._norm = new_norm(spec.embedding_norm), new_norm(spec.norm)
        slots |= nested(embedding_norm=self._embedding_norm.slots, norm=self._norm.slots)
        ropes = {(layer.attention.rope, layer.attention.head_dim) for layer in spec.layers}
        self._rotations = {
            rope: RotaryEmbedding(rope, head_dim, dtype, device) for rope, head_dim in ropes if rope is not None
        }
        self._layers = [_EncoderLayer(layer, spec.width, new_norm, ops) for layer in spec.layers]
        for idx, layer in enumerate(self._layers):
            slots |= nested(**{f"layers.{idx}": layer.slots})
        self.heads = PooledHeads(spec.classifier, spec.dense, spec.width, ops, dtype, device)
        slots |= self.heads.slots
        self.weights = WeightTable(slots, dtype, device, lambda: None)

    @property
    def kernels(self) -> str:
        """Name of the kernels."""
        return self._ops.name

    def _fill_table(self, name: str, tensor: Tensor) -> None:
        self._tables[name] = tensor.clone()

    def __call__(self, rows: TextRows) -> Tensor:
        """Return the hidden states of all rows after the last norm, [T, E]."""
        look_up, spec, positions = self._ops.embedding, self.spec, rows.positions
        x = look_up(rows.input_ids, self._tables["embedding"])
        if spec.num_token_types:
            types = rows.token_types if spec.num_token_types > 1 else torch.zeros_like(rows.input_ids)
            x = x + look_up(types, self._tables["token_types"])
        if spec.num_positions:
            x = x + look_up(positions + spec.first_position, self._tables["positions"])
        x = self._embedding_norm(x)
        rotations = {rope: rotate(positions) for rope, rotate in self._rotations.items()}
        for layer in self._layers:
            rope = layer.spec.attention.rope
            x = layer(x, rows.row_starts, None if rope is None else rotations[rope])
        return self._norm(x)


class _EncoderLayer:
    """Bidirectional attention and an MLP, each with a residual and a norm."""

    def __init__(
        self, layer: EncoderLayer, width: int, new_norm: Callable[[LayerNorm | None], AnyNorm], ops: Ops
    ) -> None:
        self.spec, self._attend = layer, ops.ragged_attention
        attention = layer.attention
        heads_width = attention.num_heads * attention.head_dim
        self._qkv = Projection(width, 3 * heads_width, attention.bias, ops)
        self._output = Projection(heads_width, width, attention.bias, ops)
        self._mlp = _MLP(layer.mlp, width, ops)
        self._mixer_norm, self._ffn_norm = new_norm(layer.mixer_norm), new_norm(layer.ffn_norm)
        self.slots = nested(
            mixer_norm=self._mixer_norm.slots,
            qkv=self._qkv.slots,
            output=self._output.slots,
            ffn_norm=self._ffn_norm.slots,
            ffn=self._mlp.slots,
        )

    def __call__(self, x: Tensor, row_starts: Sequence[int], rotation: Rotation | None) -> Tensor:
        """Run the layer over rows [T, E] of whole texts."""
        if self.spec.norm_first:
            x = self._gather(self._mixer_norm(x), x, row_starts, rotation)
            return self._mlp(self._ffn_norm(x), x)
        x = self._mixer_norm(self._gather(x, x, row_starts, rotation))
        return self._ffn_norm(self._mlp(x, x))

    def _gather(self, x: Tensor, residual: Tensor, row_starts: Sequence[int], rotation: Rotation | None) -> Tensor:
        attention = self.spec.attention
        seen = self._attend(self._qkv.run(x), attention.num_heads, row_starts, rotation, attention.window)
        return self._output.run(seen, residual)


class _MLP:
    """A two-layer perceptron, gated or not."""

    def __init__(self, mlp: EncoderMLP, width: int, ops: Ops) -> None:
        self._mlp, self._activate = mlp, ops.activate
        self._up = Projection(width, mlp.width * (2 if mlp.gated else 1), mlp.bias, ops)
        self._down = Projection(mlp.width, width, mlp.bias, ops, max_group=DOWN_GROUP)
        self.slots = nested(up=self._up.slots, down=self._down.slots)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add to `residual` [T, E] the result of the perceptron for `x` [T, E]."""
        product = self._up.run(x)
        if not self._mlp.gated:
            return self._down.run(self._activate(product, self._mlp.activation), residual)
        gates, ups = product.chunk(2, -1)
        return self._down.run(self._activate(gates, self._mlp.activation).mul_(ups), residual)
