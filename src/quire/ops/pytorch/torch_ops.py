"""The backend of stock torch operators; on a CPU with oneDNN's matmuls on packed weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from quire.config import Quantization
from quire.ops.interface.lora import TorchLoraLayer
from quire.ops.interface.ops import (
    Activation,
    AttentionBatch,
    Elementwise,
    Linear,
    PagedKV,
    PagedStates,
    Rotation,
    StateBatch,
    StepAttention,
)
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.interface.weight_formats import weight_format
from quire.ops.layers.gated import GatedLinear
from quire.ops.layers.joined import pack_joined
from quire.ops.layers.reordered import ReorderedLinear
from quire.ops.pytorch import torch_encoder, torch_rows
from quire.ops.pytorch.recurrent_mixers import RecurrentMixers
from quire.ops.pytorch.rounded_weights import round_weight
from quire.ops.pytorch.torch_attention import Scratch, TorchStepAttention
from quire.ops.pytorch.torch_quantised import TorchQuantisedLinear, TorchStoredLinear
from quire.ops.pytorch.torch_states import TorchStepStates
from quire.ops.pytorch.torch_widened import WIDENED, WidenedStepAttention

# Number of rows that the packed layout is chosen for. Layouts for 1 and for 512 rows are equally fast in bfloat16, but
# in float32 the layout for 1 row is half as fast at 4 to 16 rows.
PACK_ROWS = 16


class TorchOps:
    """Stock torch on one device.

    Args:
        device: any device of torch; packed weights are for "cpu" only.
        note: addition to the name.
        quantization: quantisation of the weights of linear layers.
    """

    def __init__(self, device: torch.device, note: str = "", quantization: Quantization | None = None) -> None:
        self.name = f"torch ({note})" if note else "torch"
        self._device = device
        self._scratch = Scratch(device)
        self._quantization = quantization
        self._can_pack: dict[torch.dtype, bool] = {}

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,
    ) -> Linear:
        """Quantise the weight, or pack it for oneDNN if this build of torch does that correctly, else copy it."""
        if gate is not None:
            return GatedLinear(self.pack_linear(weight, bias, min_bits, max_group=max_group), self.gate, gate)
        if isinstance(weight, StoredWeight):
            if weight.input_order is not None:
                linear = self.pack_linear(weight.in_own_order(), bias, min_bits, max_group=max_group)
                return ReorderedLinear(linear, weight.input_order.to(self._device))
            if weight.has_plain:
                return pack_joined(partial(self.pack_linear, min_bits=min_bits, max_group=max_group), weight, bias)
            return TorchStoredLinear(weight, bias, self._device)
        weight = weight.to(self._device)
        chosen = weight_format(self._quantization, min_bits, max_group)
        if chosen is not None:
            return TorchQuantisedLinear(round_weight(weight, chosen, self._device), bias, self._device)
        dtype = weight.dtype
        if dtype not in self._can_pack:
            self._can_pack[dtype] = self._device.type == "cpu" and packing_works(dtype)
        return PackedLinear(weight, bias) if self._can_pack[dtype] else PlainLinear(weight.clone(), bias)

    def make_lora(self, num_columns: int, max_rank: int | None = None) -> TorchLoraLayer:  # noqa: ARG002 (nothing is captured)
        """Multiply by each adapter in turn."""
        return TorchLoraLayer(num_columns)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Look up rows."""
        return torch.embedding(weight, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise rows."""
        return torch_rows.rms_norm(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Normalise rows."""
        return torch_encoder.layer_norm(x, weight, bias, eps)

    def activate(self, x: Tensor, activation: Elementwise) -> Tensor:
        """Apply an activation to each value."""
        return torch_encoder.activate(x, activation)

    def ragged_attention(
        self,
        qkv: Tensor,
        num_heads: int,
        row_starts: Sequence[int],
        rotation: Rotation | None,
        window: int | None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        """Attend sequence by sequence."""
        return torch_encoder.ragged_attention(qkv, num_heads, row_starts, rotation, window, distance_bias)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Gate rows."""
        return torch_rows.gate(gate_up, activation)

    def sigmoid_gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """Gate rows by sigmoids."""
        return gates.sigmoid().mul_(x)

    def gated_norm(self, x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Gate and normalise rows."""
        return torch_rows.gated_norm(x, gates, weight, eps)

    def apply_token_bitmask(self, logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
        """Look up the addends of eight logits by a byte of the mask; a masked fill takes much longer."""
        torch_rows.apply_token_bitmask(logits, rows, masks)

    def step_attention(self, batch: AttentionBatch, kv: PagedKV) -> StepAttention:
        """Compute row ids and masks once for all layers."""
        if kv.data.dtype in WIDENED:
            return WidenedStepAttention(batch, kv, self._scratch)
        return TorchStepAttention(batch, kv, self._scratch)

    def step_states(self, batch: StateBatch, states: PagedStates) -> RecurrentMixers:
        """Compute the input rows of convolutions once for all layers."""
        return RecurrentMixers(TorchStepStates(batch, states), self)


class PlainLinear:
    """`functional.linear`."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply, then add."""
        y = functional.linear(x, self._weight, self._bias)
        return y if residual is None else y.add_(residual)


# Number of matmul primitives that oneDNN caches. Its default, 1,024, takes up to 750 MiB in torch and oneDNN; with 64,
# steps of 400 different lengths take 46 MiB, and 1.16 times as long on a tiny model: creating a primitive takes 0.2 ms.
KEPT_SHAPES = "64"


class PackedLinear:
    """oneDNN's matmul on a weight in its own blocked layout; bias and residual are added before the only rounding."""

    __slots__ = ("_add", "_bias", "_multiply", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        operators = _onednn()
        self._weight = operators._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self._bias = bias
        self._multiply = operators._linear_pointwise.default
        self._add = operators._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply and add in one call."""
        if residual is None:
            return cast("Tensor", self._multiply(x, self._weight, self._bias, "none", [], ""))
        return cast("Tensor", self._add(x, residual, self._weight, self._bias, "add"))


def packing_works(dtype: torch.dtype) -> bool:
    """Try packed matmuls on a small weight; return False if operators are missing, fail or give wrong results."""
    generator = torch.Generator().manual_seed(0)
    weight, x, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in ((48, 32), (5, 32), (5, 48)))
    bias = weight[:, 0].contiguous()
    try:
        with torch.inference_mode():
            packed = PackedLinear(weight.clone(), bias)
            outputs = packed(x), packed(x, residual)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    product = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    return all(
        torch.allclose(y.double(), expected, rtol=tolerance, atol=tolerance)
        for y, expected in zip(outputs, (product, product + residual.double()), strict=True)
    )


def _onednn() -> Any:
    """Return the operators that torch's own compiler packs weights with; they are not part of its typed interface."""
    # Torch and oneDNN read these when they create the first matmul; each number of rows of a step is a shape to cache.
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, KEPT_SHAPES)
    return torch.ops.mkldnn
