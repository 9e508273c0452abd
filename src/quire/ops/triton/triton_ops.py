"""The backend of Triton kernels; torch computes matmuls with plain weights, except for one or two 16-bit rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from quire.config import Quantization
from quire.ops.interface.fused_layers import RoutedExperts
from quire.ops.interface.ops import (
    Activation,
    AttentionBatch,
    Linear,
    PagedKV,
    PagedStates,
    StateBatch,
    StepAttention,
    StepStates,
)
from quire.ops.interface.piecewise_steps import (
    PiecewiseAttention,
    PiecewiseAttentionBatch,
    PiecewiseStateBatch,
    PiecewiseStates,
)
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.interface.static_steps import StaticAttentionBatch, StaticLimits, StaticMemory, StaticStateBatch
from quire.ops.interface.token_draws import RowParameters
from quire.ops.interface.weight_formats import weight_format
from quire.ops.layers.gated import GatedLinear
from quire.ops.layers.joined import pack_joined
from quire.ops.layers.reordered import ReorderedLinear
from quire.ops.pytorch.recurrent_mixers import RecurrentMixers
from quire.ops.pytorch.rounded_weights import round_weight
from quire.ops.pytorch.torch_fallback import TorchFallback
from quire.ops.triton import sampling
from quire.ops.triton.adapters import TritonLoraLayer, TritonStaticAdapters
from quire.ops.triton.attention.static_attention import TritonStaticAttention, TritonStaticTokens
from quire.ops.triton.attention.step_attention import TritonStepAttention
from quire.ops.triton.kernels import rows as row_kernels
from quire.ops.triton.launches import ACTIVATIONS, Device
from quire.ops.triton.linear.plain_linear import TritonLinear
from quire.ops.triton.linear.routed_experts import TritonExperts, fuse_experts
from quire.ops.triton.linear.stored_linear import TritonQuantizedLinear, TritonStoredLinear
from quire.ops.triton.static_states import TritonStaticStates, TritonStaticStepStates
from quire.ops.triton.step_states import TritonStepStates
from quire.ops.triton.tiles import power_of_2

# Columns per program of elementwise kernels.
COLUMNS: Final = 1024


class TritonOps(TorchFallback):
    """Triton kernels, and torch's operators for the rest: embedding look-ups, plain matmuls of many rows, encoders."""

    def __init__(self, device: torch.device, quantization: Quantization | None = None) -> None:
        super().__init__(device)
        self.device = Device(device)
        self._quantization = quantization
        self.name = "triton" if self.device.is_gpu else "triton (interpreted)"

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,
    ) -> Linear:
        """Keep the codes of quantized weights, and quantize plain weights or leave their matmuls to torch."""
        if not isinstance(weight, StoredWeight):
            chosen = weight_format(self._quantization, min_bits, max_group)
            if chosen is not None:
                rounded = round_weight(weight, chosen, self.device.torch_device)
                linear = TritonQuantizedLinear(rounded, bias, self.device)
                return linear if gate is None else GatedLinear(linear, self.gate, gate)
            # Row-major, even if the stored weight is column-major, as transposed experts are.
            kept = weight.to(self.device.torch_device).clone(memory_format=torch.contiguous_format)
            return TritonLinear(kept, bias, gate, self.gate, self.device)
        if gate is not None:
            return GatedLinear(self.pack_linear(weight, bias, min_bits, max_group=max_group), self.gate, gate)
        if weight.input_order is not None:
            order = weight.input_order.to(self.device.torch_device)
            return ReorderedLinear(self.pack_linear(weight.in_own_order(), bias, min_bits, max_group=max_group), order)
        if weight.has_plain:
            return pack_joined(partial(self.pack_linear, min_bits=min_bits, max_group=max_group), weight, bias)
        return TritonStoredLinear(weight, bias, self.device)

    def make_lora(self, num_columns: int, max_rank: int | None = None) -> TritonLoraLayer:
        """Return a LoRA layer that multiplies the rows of all adapters in two launches."""
        return TritonLoraLayer(num_columns, self.device, max_rank)

    def static_adapters(self, memory: StaticMemory, limits: StaticLimits) -> TritonStaticAdapters:
        """Keep the rows of adapters in static buffers."""
        return TritonStaticAdapters(memory, limits)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Apply RMSNorm to rows, one program per row."""
        x = x if x.stride(1) == 1 else x.contiguous()
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        num_rows, width = x.shape
        if num_rows:
            row_kernels.rms_norm[num_rows,](
                output, x, weight, eps, width, x.stride(0), WIDTH=power_of_2(width), num_warps=_warps(width),
                **self.device.overlapping,
            )  # fmt: skip
        return output

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Gate rows."""
        num_rows, width = gate_up.shape
        width //= 2
        output = gate_up.new_empty(num_rows, width)
        if num_rows:
            columns = min(COLUMNS, power_of_2(width))
            row_kernels.gate[num_rows, -(-width // columns)](
                output, gate_up, width, ACTIVATION=ACTIVATIONS[activation], COLUMNS=columns, **self.device.overlapping
            )
        return output

    def sigmoid_gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """Gate values by sigmoids."""
        output = torch.empty_like(x)
        if x.numel():
            row_kernels.sigmoid_gate[-(-x.numel() // COLUMNS),](output, x, gates, x.numel(), COLUMNS=COLUMNS)
        return output

    def gated_norm(self, x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Gate and normalise rows, one program per row and part."""
        output = gates.new_empty(x.shape)
        num_parts, width = weight.shape
        if len(x):
            row_kernels.gated_norm[len(x), num_parts](
                output, x, gates, weight, eps, width, num_parts, gates.stride(0), WIDTH=power_of_2(width),
                num_warps=_warps(width),
            )  # fmt: skip
        return output

    def apply_token_bitmask(self, logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
        """Set the logits of forbidden tokens to -inf; all masks are copied to the device together."""
        if not rows:
            return
        vocab_size = logits.shape[1]
        words = self.device.placed(torch.stack(list(masks)))
        row_kernels.apply_token_bitmask[len(rows), -(-vocab_size // COLUMNS)](
            logits, self.device.numbers(rows), words, vocab_size, words.shape[1], COLUMNS=COLUMNS
        )

    def check_logits(self, logits: Tensor) -> Tensor:
        """Return which rows can be sampled from."""
        return sampling.check_logits(logits)

    def draw_tokens(
        self, logits: Tensor, parameters: RowParameters | None, positions: Tensor | None, before: Tensor | None
    ) -> Tensor:
        """Sample a token for each row."""
        return sampling.draw_tokens(logits, parameters, positions, before)

    def step_attention(self, batch: AttentionBatch, kv: PagedKV) -> StepAttention:
        """Plan the work of a step once for all layers."""
        if isinstance(batch, PiecewiseAttentionBatch):
            return PiecewiseAttention(self._step_attention(batch, kv), batch)
        return self._step_attention(batch, kv)

    def _step_attention(self, batch: AttentionBatch, kv: PagedKV) -> StepAttention:
        if kv.data.dtype == torch.int8 and kv.head_dim % 4:
            return self._torch.step_attention(batch, kv)  # scales that are not aligned
        if isinstance(batch, StaticAttentionBatch):
            return TritonStaticAttention(batch, kv, self.device)
        return TritonStepAttention(batch, kv, self.device)

    def step_states(self, batch: StateBatch, states: PagedStates) -> StepStates:
        """Copy the batch to the device once for all layers."""
        if isinstance(batch, PiecewiseStateBatch):
            return PiecewiseStates(batch)
        if isinstance(batch, StaticStateBatch):
            return RecurrentMixers(TritonStaticStepStates(batch, states), self)
        return RecurrentMixers(TritonStepStates(batch, states, self.device), self)

    def static_tokens(
        self, kv: PagedKV, window: int | None, chunk: int | None, memory: StaticMemory, limits: StaticLimits
    ) -> TritonStaticTokens | None:
        """Keep work items in static buffers; None if attention falls back to torch."""
        if kv.data.dtype == torch.int8 and kv.head_dim % 4:
            return None
        return TritonStaticTokens(kv, window, chunk, memory, limits, self.device)

    def static_states(self, memory: StaticMemory, limits: StaticLimits) -> TritonStaticStates:
        """Keep the blocks of states in static buffers."""
        return TritonStaticStates(memory, limits)

    def fuse_experts(self, experts: RoutedExperts) -> TritonExperts | None:
        """Return the experts of a layer as two grouped GEMMs; None if they cannot be grouped."""
        return fuse_experts(experts, self.gate)


def _warps(width: int) -> int:
    """Return the number of warps of a program that holds a row."""
    return 4 if width <= 4096 else 8
