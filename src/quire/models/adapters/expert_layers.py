"""The layers of single experts: their names in checkpoints and adapters, and the places of an adapter's matrices.

PEFT has two forms. If each expert consists of linear layers, as in transformers 4, an adapter has two matrices for each
of them. If all experts of a layer are one parameter [X, out, in], as in transformers 5, PEFT wraps the module of all
experts once for each parameter (`target_parameters`), and one matrix has the ranks of all experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.models.adapters.names import module_key
from quire.models.specs.spec import Experts, ModelSpec, WeightMap, experts_of

GATE_UP: Final = "gate_up_proj"
DOWN: Final = "down_proj"
# Names of an expert's linear layers -> index in (gate, up, down).
_PARTS: Final = {"gate_proj": 0, "up_proj": 1, "down_proj": 2, "w1": 0, "w3": 1, "w2": 2}
_LINEAR = re.compile(rf"(?P<experts>.+)\.(?P<number>0|[1-9][0-9]{{0,6}})\.(?P<part>{'|'.join(_PARTS)})")
# Modules with the parameter `weight` of all experts of a Granite model, in some versions of transformers.
_OLDER_MODULES: Final = {"input_linear": GATE_UP, "output_linear": DOWN}
_WRAPPER: Final = ".base_layer"


class ExpertLayer(NamedTuple):
    """One linear layer of all experts of a layer.

    Args:
        weight: name of its weight in the decoder.
        parameter: name of the parameter in transformers, `GATE_UP` or `DOWN`.
        num_experts: number of experts on all ranks.
        in_width, out_width: widths of each expert on all ranks; outputs of `GATE_UP` are all gates, then all ups.
        layout: see `Experts.parameters`.
        is_transposed, is_interleaved: layout of a checkpoint's tensor of all experts; see `Experts`.
    """

    weight: str
    parameter: str
    num_experts: int
    in_width: int
    out_width: int
    layout: str
    is_transposed: bool
    is_interleaved: bool

    def by_layout(self, rows: Tensor) -> Tensor:
        """Reorder values [..., out, r] from the order of the parameter to the order of the outputs."""
        if self.layout != "alternating" or self.parameter != GATE_UP:
            return rows
        return torch.cat([rows[..., ::2, :], rows[..., 1::2, :]], -2)


class LinearPlace(NamedTuple):
    """A linear layer of one expert, as rows of an `ExpertLayer`."""

    layer: ExpertLayer
    expert: int
    first_row: int
    num_rows: int


class ExpertLayers:
    """The layers of single experts of a model; none without a specification."""

    def __init__(self, spec: ModelSpec | None, weight_map: WeightMap) -> None:
        self.layers: dict[str, ExpertLayer] = {}
        self._by_module: dict[str, tuple[ExpertLayer, ...]] = {}
        if spec is None:
            return
        for ours, experts in _experts(spec):
            pair = tuple(_layers(ours, experts, spec.width))
            self.layers |= {layer.weight: layer for layer in pair}
            source = weight_map[pair[0].weight][0]
            head = source.partition(".experts.")[0] if ".experts." in source else source.rsplit(".", 2)[0]
            self._by_module[module_key(f"{head}.experts")] = pair
            for older, parameter in _OLDER_MODULES.items():
                of_parameter = tuple(layer for layer in pair if layer.parameter == parameter)
                self._by_module[module_key(f"{head}.{older}")] = of_parameter

    @property
    def num_values_per_rank(self) -> int:
        """Number of values in an adapter of rank 1 for all linear layers of all experts."""
        return sum(layer.num_experts * (2 * layer.in_width + layer.out_width) for layer in self.layers.values())

    @property
    def num_linears(self) -> int:
        """Number of linear layers of all experts."""
        return sum(layer.num_experts * (2 if layer.parameter == GATE_UP else 1) for layer in self.layers.values())

    def sources(self, weight_map: WeightMap) -> dict[str, ExpertSource]:
        """Return the contents of the layers' tensors, by the tensors' names."""
        sources = {}
        for name, layer in self.layers.items():
            num_parts = 2 if layer.parameter == GATE_UP else 1
            num_rows = layer.out_width // num_parts
            for idx, source in enumerate(weight_map[name]):
                linear = LinearPlace(layer, idx // num_parts, idx % num_parts * num_rows, num_rows)
                sources[source] = ExpertSource(layer, linear if len(weight_map[name]) > 1 else None)
        return sources

    def linear(self, key: str) -> LinearPlace | None:
        """Return the place of an expert's linear layer by `module_key`; None for other modules."""
        match = _LINEAR.fullmatch(key)
        if match is None:
            return None
        part, number = _PARTS[match["part"]], int(match["number"])
        for layer in self._by_module.get(match["experts"], ()):
            if (layer.parameter == DOWN) == (part == 2) and number < layer.num_experts:
                num_rows = layer.out_width if part == 2 else layer.out_width // 2
                return LinearPlace(layer, number, num_rows if part == 1 else 0, num_rows)
        return None

    def parameters(self, key: str) -> tuple[ExpertLayer, ...]:
        """Return the possible target layers of an adapter for a module of all experts, by `module_key`."""
        return self._by_module.get(without_wrappers(key), ())


def without_wrappers(name: str) -> str:
    """Return the name of a module without the names of PEFT's nested wrappers of its parameters."""
    while name.endswith(_WRAPPER):
        name = name.removesuffix(_WRAPPER)
    return name


def parameter_name(module: str, layer: ExpertLayer) -> str:
    """Return the name in the file of the target parameter of an adapter for a module of all experts."""
    module = without_wrappers(module)
    return f"{module}.{'weight' if module.rpartition('.')[2] in _OLDER_MODULES else layer.parameter}"


def _experts(spec: ModelSpec) -> Iterator[tuple[str, Experts]]:
    """Yield the gated experts of each layer with some, after their name in the decoder; plain ones take no adapters."""
    for idx, layer in enumerate(spec.layers):
        experts = experts_of(layer.ffn)
        if experts is not None and experts.plain is None:
            yield f"layers.{idx}.ffn" if layer.ffn is experts else f"layers.{idx}.ffn.experts", experts


def _layers(ours: str, experts: Experts, width: int) -> Iterator[ExpertLayer]:
    for slot, parameter, widths in (
        ("gate_up", GATE_UP, (width, 2 * experts.width)),
        ("down", DOWN, (experts.width, width)),
    ):
        stored = experts.transposed, experts.interleaved
        yield ExpertLayer(f"{ours}.{slot}.weight", parameter, experts.num_experts, *widths, experts.parameters, *stored)


class ExpertMatrices(NamedTuple):
    """An adapter's matrices for some rows of one expert, in their stored dtypes.

    Args:
        first_row: index of the first output among the expert's outputs.
        a: [r, in].
        b: [n, r].
        scale: factor of their product.
    """

    first_row: int
    a: Tensor
    b: Tensor
    scale: float


# Matrices by the name of their layer's weight in the decoder, and by expert.
AdaptedExperts = dict[str, dict[int, list[ExpertMatrices]]]


class ExpertSource(NamedTuple):
    """A checkpoint's tensor with weights of a layer of experts.

    Args:
        layer: the layer.
        linear: place of the expert's linear layer; None for a tensor of all experts.
    """

    layer: ExpertLayer
    linear: LinearPlace | None

    def merged(self, weight: Tensor, experts: Mapping[int, list[ExpertMatrices]], dtype: torch.dtype) -> Tensor | None:
        """Return the tensor plus the adapter's delta, computed in float32; None without a delta.

        Args:
            weight: the tensor: [n, in] of one expert, or [X * out, in] or (transposed) [X, in, out] of all.
            experts: matrices by expert.
            dtype: dtype of the result.
        """
        layer, linear = self
        if linear is not None:
            if linear.expert not in experts:
                return None
            rows = slice(linear.first_row, linear.first_row + linear.num_rows)
            return (weight.float() + _delta(layer, experts[linear.expert])[rows]).to(dtype)
        if not experts:
            return None
        merged = weight.to(dtype, copy=True)
        of_experts = zip(*(tensor.chunk(layer.num_experts) for tensor in (weight, merged)), strict=True)
        for idx, (before, after) in enumerate(of_experts):
            if idx in experts:
                delta = _delta(layer, experts[idx])
                if layer.is_interleaved and layer.parameter == GATE_UP:
                    delta = torch.stack(delta.chunk(2), 1).flatten(0, 1)
                delta = delta.mT if layer.is_transposed else delta
                after.copy_(before.float() + delta.reshape(before.shape))
        return merged


def _delta(layer: ExpertLayer, parts: list[ExpertMatrices]) -> Tensor:
    """Return an adapter's delta of one expert's weight, [out, in] of float32."""
    delta = torch.zeros(layer.out_width, layer.in_width)
    for first_row, a, b, scale in parts:
        delta[first_row : first_row + len(b)] = scale * (b.float() @ a.float())
    return delta


def is_first_of_inputs(layer: ExpertLayer, width: int, version: tuple[int, ...] | None) -> bool | None:
    """Return whether `lora_A` multiplies the inputs of a layer, and not `lora_B`; None if that is unknown.

    PEFT chooses one dimension of a parameter [X, d1, d2] as the inputs, without knowledge of the model: d1 until 0.18;
    later d2, unless transformers marks the parameter as transposed (in gpt-oss only); 0.19.0 swapped the two cases. The
    widths tell the choice unless d1 = d2.
    """
    if layer.in_width != layer.out_width:
        return width == layer.in_width
    is_marked = layer.layout == "alternating"
    if version is None:
        # The first versions, which did not write their number, and the latest versions agree for marked parameters.
        return True if is_marked else None
    is_swapped = False if version < (0, 19) else is_marked if version < (0, 19, 1) else not is_marked
    return is_swapped == (layer.layout == "rows")


def split_by_expert(
    layer: ExpertLayer, a: Tensor, b: Tensor, scale: float, *, is_straight: bool
) -> Mapping[int, ExpertMatrices]:
    """Split the matrices of all experts into each expert's matrices.

    Args:
        layer: layer of the experts.
        a: [X * r, n], with the ranks of an expert adjacent.
        b: [m, r * X], with the experts of a rank adjacent.
        scale: factor of their product.
        is_straight: `a` multiplies the inputs, and not `b`.
    """
    firsts = a.reshape(layer.num_experts, -1, a.shape[1])
    seconds = b.reshape(len(b), -1, layer.num_experts).permute(2, 0, 1)
    if not is_straight:
        firsts, seconds = seconds.mT, firsts.mT
    seconds = layer.by_layout(seconds)
    return {
        idx: ExpertMatrices(0, *pair, scale)
        for idx, pair in enumerate(zip(firsts.unbind(), seconds.unbind(), strict=True))
    }
