"""The encoder of all families, as an `EncoderSpec` describes it: over ragged rows, without padding or a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.models.modules.norms import AnyNorm, Norm, make_norm
from quire.models.modules.pooled_heads import PooledHeads
from quire.models.modules.projections import Projection, ResidualAdd, ResidualProjection
from quire.models.modules.rope import RotaryEmbedding
from quire.models.modules.weight_slots import WeightSlot, WeightTable, nested
from quire.models.specs.encoder_spec import (
    BidirectionalAttention,
    EncoderLayer,
    EncoderMLP,
    EncoderSpec,
    RelativePositions,
)
from quire.models.specs.parameter_counts import DOWN_GROUP
from quire.ops.interface.ops import Ops, Rotation

# Name of the addends of scores by distance.
_RELATIVE: Final = "relative_positions"


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
        if spec.relative_positions is not None:
            shape = spec.relative_positions.num_buckets, spec.layers[0].attention.num_heads
            slots[f"{_RELATIVE}.weight"] = WeightSlot(shape, partial(self._fill_distances, spec.relative_positions))
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        self._embedding_norm, self._norm = new_norm(spec.embedding_norm), new_norm(spec.norm)
        slots |= nested(embedding_norm=self._embedding_norm.slots, norm=self._norm.slots)
        ropes = {(layer.attention.rope, layer.attention.head_dim) for layer in spec.layers}
        self._rotations = {
            rope: RotaryEmbedding(rope, head_dim, dtype, device) for rope, head_dim in ropes if rope is not None
        }
        self._layers = [EncoderBlock(layer, spec.width, new_norm, ops) for layer in spec.layers]
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

    def _fill_distances(self, positions: RelativePositions, weight: Tensor) -> None:
        """Keep the addends of each distance, [H, 2 R + 1], from those of each bucket."""
        buckets = distance_buckets(positions, self.spec.max_position - 1)
        self._tables[_RELATIVE] = weight[buckets.to(weight.device)].to(self.dtype).T.contiguous().to(self.device)

    def __call__(self, rows: TextRows) -> Tensor:
        """Return the hidden states of all rows after the last norm, [T, E]."""
        look_up, spec, positions = self._ops.embedding, self.spec, rows.positions
        x = look_up(rows.input_ids, self._tables["embedding"])
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if spec.num_token_types:
            types = rows.token_types if spec.num_token_types > 1 else torch.zeros_like(rows.input_ids)
            x = x + look_up(types, self._tables["token_types"])
        if spec.num_positions:
            x = x + look_up(positions + spec.first_position, self._tables["positions"])
        x = self._embedding_norm(x)
        rotations = {rope: rotate(positions) for rope, rotate in self._rotations.items()}
        for layer in self._layers:
            rope = layer.spec.attention.rope
            rotation = None if rope is None else rotations[rope]
            x = layer(x, rows.row_starts, rotation, self._tables.get(_RELATIVE))
        return self._norm(x)


class EncoderBlock:
    """Bidirectional attention and an MLP, each with a residual and norms."""

    def __init__(
        self,
        layer: EncoderLayer,
        width: int,
        new_norm: Callable[..., AnyNorm],
        ops: Ops,
    ) -> None:
        self.spec = layer
        output_norms = [None if layer.output_norm is None else new_norm(layer.output_norm) for _ in range(2)]
        attention_sum, mlp_sum = (ResidualAdd(norm if isinstance(norm, Norm) else None) for norm in output_norms)
        self._attend = _BidirectionalHeads(layer.attention, width, attention_sum, new_norm, ops)
        self._mlp = _MLP(layer.mlp, width, mlp_sum, ops)
        self._mixer_norm, self._ffn_norm = new_norm(layer.mixer_norm), new_norm(layer.ffn_norm)
        self.slots = nested(mixer_norm=self._mixer_norm.slots, ffn_norm=self._ffn_norm.slots, ffn=self._mlp.slots)
        self.slots |= self._attend.slots

    def __call__(self, x: Tensor, row_starts: Sequence[int], rotation: Rotation | None, bias: Tensor | None) -> Tensor:
        """Run the layer over rows [T, E] of whole texts."""
        # No name keeps intermediate results alive.
        return self.rest(self.seen(self.heads(x), (0, self.spec.attention.num_heads), row_starts, rotation, bias), x)

    def heads(self, x: Tensor) -> Tensor:
        """Return queries, keys and values of rows [T, E], [T, 3 H D]: the layer's first part, row by row."""
        return self._attend.heads(self._mixer_norm(x) if self.spec.norm_first else x)

    def seen(
        self,
        heads: Tensor,
        part: tuple[int, int],
        row_starts: Sequence[int],
        rotation: Rotation | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Return results of heads `part[0]` to `part[1]`, [T, (part[1] - part[0]) D]: the second part.

        Args:
            heads: result of `heads` for all rows of the texts.
            part: range of heads.
            row_starts, rotation, bias: see `Ops.ragged_attention`; without a bias for a part of the heads.
        """
        return self._attend.seen(heads, part, row_starts, rotation, bias)

    def rest(self, seen: Tensor, x: Tensor) -> Tensor:
        """Return the output of rows [T, E] from results of all heads and the layer's input: the last part."""
        x = self._attend.output(seen, x)
        del seen
        if self.spec.norm_first:
            return self._mlp(self._ffn_norm(x), x)
        x = self._mixer_norm(x)
        return self._ffn_norm(self._mlp(x, x))


class _BidirectionalHeads:
    """Bidirectional attention with its projections."""

    def __init__(
        self,
        attention: BidirectionalAttention,
        width: int,
        addition: ResidualAdd,
        new_norm: Callable[..., AnyNorm],
        ops: Ops,
    ) -> None:
        self._spec, self._attend = attention, ops.ragged_attention
        num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self._qkv = Projection(width, (num_heads + 2 * num_kv_heads) * head_dim, attention.qkv_bias, ops)
        self._output = ResidualProjection(num_heads * head_dim, width, attention.output_bias, addition, ops)
        self._q_norm, self._k_norm = (new_norm(attention.qk_norm, width=head_dim) for _ in range(2))
        # The operation divides scores by the root of the head's width.
        scale = attention.score_scale
        self._q_factor = 1.0 if scale is None else scale * math.sqrt(head_dim)
        self._is_plain = num_heads == num_kv_heads and attention.qk_norm is None and self._q_factor == 1.0
        self.slots = nested(
            qkv=self._qkv.slots,
            q_norm=self._q_norm.slots,
            k_norm=self._k_norm.slots,
            output=self._output.slots,
        )

    def heads(self, x: Tensor) -> Tensor:
        """Return queries, keys and values [T, 3 H D] of `x` [T, E]."""
        qkv = self._qkv.run(x)
        return qkv if self._is_plain else self._normed(qkv)

    def seen(
        self,
        heads: Tensor,
        part: tuple[int, int],
        row_starts: Sequence[int],
        rotation: Rotation | None,
        bias: Tensor | None,
    ) -> Tensor:
        """See `EncoderBlock.seen`."""
        (start, end), num_heads = part, self._spec.num_heads
        if end - start < num_heads:
            heads = heads.view(len(heads), 3, num_heads, -1)[:, :, start:end].flatten(1)
        return self._attend(heads, end - start, row_starts, rotation, self._spec.window, bias)

    def output(self, seen: Tensor, residual: Tensor) -> Tensor:
        """Add the output of results of all heads [T, H D] to `residual` [T, E]."""
        return self._output(seen, residual)

    def _normed(self, qkv: Tensor) -> Tensor:
        """Return [T, 3 H D], with normed heads and with keys and values for each query head, of [T, (H + 2 K) D]."""
        num_heads, num_kv_heads, head_dim = self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim
        q, k, v = qkv.view(len(qkv), -1, head_dim).tensor_split((num_heads, num_heads + num_kv_heads), 1)
        q = self._q_norm(q.reshape(-1, head_dim)).view(q.shape)
        k = self._k_norm(k.reshape(-1, head_dim)).view(k.shape)
        if self._q_factor != 1.0:
            q = q * self._q_factor
        k, v = (part.repeat_interleave(num_heads // num_kv_heads, 1) for part in (k, v))
        return torch.cat((q, k, v), 1).flatten(1)


class _MLP:
    """A two-layer perceptron, gated or not."""

    def __init__(self, mlp: EncoderMLP, width: int, addition: ResidualAdd, ops: Ops) -> None:
        self._mlp, self._activate = mlp, ops.activate
        self._up = Projection(width, mlp.width * (2 if mlp.gated else 1), mlp.bias, ops)
        self._down = ResidualProjection(mlp.width, width, mlp.bias, addition, ops, max_group=DOWN_GROUP)
        self.slots = nested(up=self._up.slots, down=self._down.slots)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add to `residual` [T, E] the result of the perceptron for `x` [T, E]."""
        product = self._up.run(x)
        if not self._mlp.gated:
            return self._down(self._activate(product, self._mlp.activation), residual)
        gates, ups = product.chunk(2, -1)
        return self._down(self._activate(gates, self._mlp.activation).mul_(ups), residual)


def distance_buckets(positions: RelativePositions, reach: int) -> Tensor:
    """Return the bucket of each distance of a key from its query, from `-reach` to `reach`: [2 reach + 1] of int64.

    The logarithm is taken in float32, as in T5: at distances that are powers of two its rounding decides the bucket.
    """
    distances = torch.arange(-reach, reach + 1)
    per_side = positions.num_buckets // 2
    num_exact = per_side // 2
    away = distances.abs()
    steps = torch.log(away.clamp(min=1).float() / num_exact) / math.log(positions.max_distance / num_exact)
    far = (num_exact + (steps * (per_side - num_exact)).long()).clamp(max=per_side - 1)
    return torch.where(away < num_exact, away, far) + per_side * (distances > 0)
