"""Models on quantised weights, against the same model on the dequantised values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config import Quantization
from quire.models.families import build
from quire.models.modules.decoder import Decoder
from quire.ops import make_ops
from quire.ops.interface.ops import Activation, Linear, Ops
from quire.ops.interface.quantized_weight import StoredWeight, WeightForm
from quire.ops.reference.reference_ops import ReferenceLinear, ReferenceOps
from quire.ops.reference.reference_quantised import ReferenceQuantisedLinear
from tests.models.tiny import PagedRun, fill, make_tiny

CPU = torch.device("cpu")


class DequantisedOps(ReferenceOps):
    """The reference on weights that were rounded; rows are not."""

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,
    ) -> Linear:
        linear = super().pack_linear(weight, bias, min_bits, gate, max_group=max_group)
        if not isinstance(linear, ReferenceQuantisedLinear):
            return linear
        return ReferenceLinear(linear.dequantised()[:, : weight.shape[1]], bias)  # without what it is padded with


def logits_of(name: str, ops: Ops) -> list[Tensor]:
    """Return a prompt's logits, and those of a token behind it."""
    tiny = make_tiny(name)
    spec, weight_map = build(tiny.config)
    decoder = Decoder(spec, ops=ops, dtype=torch.float32, device=CPU)
    fill(decoder, weight_map, tiny.reference.state_dict())
    run = PagedRun(decoder)
    return [run.step({0: list(range(3, 40))})[0], run.step({0: [7]})[0]]


class FormsOfWeights(ReferenceOps):
    """Records the forms of the layers that were packed since the last look."""

    def __init__(self, quantization: Quantization) -> None:
        super().__init__(quantization)
        self.forms: list[WeightForm] = []

    def pack_linear(self, *args: Any, **options: Any) -> Linear:
        linear = super().pack_linear(*args, **options)
        if isinstance(linear, ReferenceQuantisedLinear):
            self.forms += [form for form, _ in linear._parts]
        return linear


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "qwen3.5-moe", "gemma4", "lfm2", "falcon-h1"])
def test_down_projections_have_a_scale_for_16_inputs_in_int8(name: str, quantization: Quantization) -> None:
    """Also those of experts and shared experts: their inputs have outliers. Other layers have groups of 32."""
    ops, groups = FormsOfWeights(quantization), {}
    decoder = Decoder(build(make_tiny(name).config)[0], ops=ops, dtype=torch.float32, device=CPU)
    for weight, shape in decoder.weights.shapes().items():
        decoder.weights.load(weight, torch.zeros(shape, dtype=decoder.weights.dtype(weight)))
        if ops.forms:
            groups[weight] = {form.group for form in ops.forms}
            ops.forms.clear()
    downs = {weight for weight in groups if weight.endswith("down.weight")}
    assert len(downs) >= len(decoder.spec.layers)
    for weight, found in groups.items():
        assert found == {16 if quantization == "int8" and weight in downs else 32}, weight


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "lfm2", "granite4"])
def test_logits(name: str, quantization: Quantization) -> None:
    """Rounding rows to int8 moves logits by a few percent of their spread; a wrong weight would by all of it."""
    found = logits_of(name, make_ops(CPU, quantization=quantization))
    expected = logits_of(name, DequantisedOps(quantization))
    plain = logits_of(name, make_ops(CPU))
    for ours, dequantised, exact in zip(found, expected, plain, strict=True):
        spread = exact.std()
        rounding, of_weights = ((ours - each).square().mean().sqrt() / spread for each in (dequantised, exact))
        assert rounding < 0.1
        if quantization == "int8":
            assert of_weights < 0.12
        else:
            assert 2 * rounding < of_weights < 1.0
