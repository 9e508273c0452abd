"""Calibration: layers run one at a time over a text, and each layer is quantised for its observed inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.cli.quantization.coordinate_descent import quantize
from quire.cli.quantization.paged_rows import CPU, run_sequences, split_sequences
from quire.cli.quantization.rounding import QuantizedMatrix, Scheme
from quire.errors import ConfigError, UnsupportedModel
from quire.models.checkpoints.tensor_reader import TensorReader, join_parts
from quire.models.modules.decoder import Decoder
from quire.models.specs.spec import Attention, ModelSpec, WeightMap, experts_of
from quire.ops import make_ops
from quire.ops.interface.ops import Linear

# Number of rows that a layer computes at a time.
STEP_TOKENS = 2048


class ObservedLinear:
    """A linear layer that accumulates the Gram matrix of its inputs.

    If it is paired, it is called twice for each step: with inputs of the original model, then of the quantised one.
    """

    def __init__(self, linear: Linear, width: int, is_paired: bool) -> None:
        self._linear = linear
        self._first: Tensor | None = None
        self.is_paired = is_paired
        self.gram = torch.zeros(width, width)
        self.cross = torch.zeros(width, width) if is_paired else self.gram

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the layer's result."""
        if not self.is_paired:
            self.gram.addmm_(x.t(), x)
        elif self._first is None:
            self._first = x.clone()
        else:
            self.gram.addmm_(x.t(), x)
            self.cross.addmm_(self._first.t(), x)
            self._first = None
        return self._linear(x, residual)


class ObservingOps:
    """A backend whose linear layers are observed if their weight has a name."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.name_of_weight: str | None = None
        self.is_paired = True
        self.linears: dict[str, list[ObservedLinear]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def fuse_layers(self, _layers: object) -> None:
        """Do not fuse layers: within one native call, inputs cannot be observed."""

    def fuse_norm(self, _norm: object, _linear: object) -> None:
        """Do not fuse a norm with a linear layer."""

    def fuse_experts(self, _experts: object) -> None:
        """Do not fuse experts."""

    def pack_linear(self, weight: Any, *args: Any, **options: Any) -> Linear:
        """Pack a weight; observe the layer if the weight has a name."""
        linear: Linear = self._ops.pack_linear(weight, *args, **options)
        if self.name_of_weight is None:
            return linear
        observed = ObservedLinear(linear, weight.shape[1], self.is_paired)
        self.linears.setdefault(self.name_of_weight, []).append(observed)
        return observed


class Calibration:
    """Quantises layers in order; has the hidden states of a text before the next layer."""

    def __init__(
        self, spec: ModelSpec, weight_map: WeightMap, reader: TensorReader, sequences: Sequence[Sequence[int]]
    ) -> None:
        parts = (part for layer in spec.layers for part in layer.parts)
        if spec.per_layer_inputs is not None or any(isinstance(p, Attention) and p.source is not None for p in parts):
            raise UnsupportedModel(
                "layers of this model read the cache of others, or inputs besides the hidden states: calibration runs "
                "each layer by itself, so leave calibration out (method rounded)"
            )
        self._spec, self._weight_map, self._reader = spec, weight_map, reader
        self._steps = split_sequences([len(sequence) for sequence in sequences], STEP_TOKENS)
        ids = torch.tensor([token_id for sequence in sequences for token_id in sequence])
        if int(ids.max()) >= spec.vocab_size:
            raise ConfigError(
                f"the tokenizer gives token id {int(ids.max())}, but the model has {spec.vocab_size} tokens",
                field="calibration",
            )
        embedding = self._read_plain(*weight_map["embedding.weight"])
        # In the original model, and in the quantised one.
        self._hidden = self._rounded = embedding.index_select(0, ids).float() * spec.embedding_scale

    def quantize_layer(
        self, idx: int, weights: Mapping[str, tuple[str, ...]], scheme: Scheme
    ) -> Iterator[tuple[str, QuantizedMatrix]]:
        """Quantise a layer for its inputs; the outputs of the quantised layer become the inputs of the next one."""
        ops = ObservingOps(make_ops(CPU))
        layer_weights = {name: sources for name, sources in weights.items() if name.startswith(f"layers.{idx}.")}
        self._hidden = self._observe(self._layer(idx, ops, layer_weights, {}))
        quantized: dict[str, Tensor] = {}
        for name, sources in layer_weights.items():
            observed = ops.linears.pop(name)
            # Tensors with the same inputs are quantised together: all tensors of the weight, or of each expert.
            layers = observed[:1] if observed[0].is_paired else observed
            count = len(sources) // len(layers)
            for number, layer in enumerate(layers):
                parts = sources[number * count : (number + 1) * count]
                tensors = [self._read_plain(source) for source in parts]
                matrix = quantize(torch.cat(tensors).float(), layer.gram, layer.cross, scheme)
                for source, part in zip(parts, matrix.split([len(tensor) for tensor in tensors]), strict=True):
                    quantized[source] = part.dequantize()
                    yield source, part
        decoder = self._layer(idx, make_ops(CPU), {}, quantized)
        self._rounded = torch.cat([_run(decoder, self._rounded[rows], lengths) for rows, lengths in self._steps])

    def _layer(self, idx: int, ops: Any, observed: Mapping[str, object], replaced: Mapping[str, Tensor]) -> Decoder:
        """Return a decoder of one layer, in float32, which takes hidden states as inputs."""
        spec = replace(self._spec, layers=(self._spec.layers[idx],), vocab_size=1, tied_head=True)
        has_experts = experts_of(spec.layers[0].ffn) is not None
        decoder = Decoder(spec, ops=ops, dtype=torch.float32, device=CPU)
        for name, shape in decoder.weights.shapes().items():
            if not name.startswith("layers."):
                decoder.weights.load(name, torch.zeros(shape))
                continue
            whole = f"layers.{idx}.{name.removeprefix('layers.0.')}"
            if isinstance(ops, ObservingOps):
                ops.name_of_weight = whole if whole in observed else None
                is_shared = ".ffn.shared." in whole or ".ffn.mlp." in whole
                ops.is_paired = is_shared or not (has_experts and ".ffn." in whole)
            tensor = self._read(whole, replaced)
            decoder.weights.load(name, tensor.view(shape) if isinstance(tensor, Tensor) else tensor)
            self._reader.let_go(self._weight_map[whole])
        return decoder

    def _read(self, name: str, replaced: Mapping[str, Tensor]) -> Any:
        sources = self._weight_map[name]
        parts = [replaced[source] if source in replaced else self._reader.read(source) for source in sources]
        shapes = [part.shape for part in parts if isinstance(part, Tensor)]
        return join_parts(parts, (sum(shape[0] for shape in shapes), *shapes[0][1:]), torch.float32)

    def _read_plain(self, source: str) -> Tensor:
        tensor = self._reader.read(source)
        assert isinstance(tensor, Tensor)
        return tensor

    def _observe(self, decoder: Decoder) -> Tensor:
        """Run a layer over the hidden states of both models, and return its outputs in the original one."""
        outputs = []
        for rows, lengths in self._steps:
            outputs.append(_run(decoder, self._hidden[rows], lengths))
            _run(decoder, self._rounded[rows], lengths)
        return torch.cat(outputs)


def _run(decoder: Decoder, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return a layer's outputs for hidden states [T, E]."""
    return run_sequences(decoder, torch.zeros(len(hidden), dtype=torch.int64), lengths, hidden)
