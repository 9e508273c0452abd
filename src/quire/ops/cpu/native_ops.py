"""The backend of native kernels, for CPUs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.config import Quantization
from quire.errors import ConfigError
from quire.ops.cpu.native_attention import NativeStepAttention, reads_cache
from quire.ops.cpu.native_experts import NativeExperts
from quire.ops.cpu.native_layer_calls import can_fuse, can_fuse_experts
from quire.ops.cpu.native_layers import NativeLayers, NativeNormedLinear
from quire.ops.cpu.native_library import ACTIVATIONS, TYPES, NativeLibrary
from quire.ops.cpu.native_linear import ExactNativeLinear, NativeLinear
from quire.ops.cpu.native_lora import NativeLoraLayer
from quire.ops.cpu.native_states import NativeStepStates
from quire.ops.interface.fused_layers import PackedLayer, RoutedExperts, RowNorm
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
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.interface.shared_ranks import SharedMemoryRanks
from quire.ops.interface.weight_formats import weight_format
from quire.ops.interface.weight_memory import WeightMemory
from quire.ops.layers.gated import GatedLinear
from quire.ops.layers.joined import pack_joined
from quire.ops.layers.reordered import ReorderedLinear
from quire.ops.pytorch.torch_fallback import TorchFallback


class NativeOps(TorchFallback):
    """Native kernels; embedding look-ups, recurrences over many rows, and some matmuls are left to torch."""

    def __init__(
        self,
        library: NativeLibrary,
        quantization: Quantization | None = None,
        is_lossless: bool = False,
        deterministic: bool = False,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self._library = library
        self._quantization = quantization
        self._lossless = library.lossless if is_lossless else None
        self._plain_bytes = self._lossless_bytes = 0
        self._is_deterministic = deterministic
        self._memory = WeightMemory()

    @property
    def name(self) -> str:
        """Name of the kernels, for logs."""
        packed = f", weights packed lossless to {self.lossless_share:.1%}" if self._plain_bytes else ""
        return f"native ({self._library.level}){packed}" + (", deterministic" if self._is_deterministic else "")

    @property
    def lossless_share(self) -> float:
        """Compressed bytes of all lossless weights so far, tables included, per uncompressed byte; 1 without any."""
        return self._lossless_bytes / self._plain_bytes if self._plain_bytes else 1.0

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,
        max_group: int = 32,
    ) -> Linear:
        """Quantise a weight, or pack it for the native kernels if they are faster, else for oneDNN."""
        if isinstance(weight, StoredWeight):
            pack_plain = partial(self.pack_linear, min_bits=min_bits, num_slices=num_slices, max_group=max_group)
            return self._pack_stored(weight, bias, pack_plain, gate, num_slices)
        chosen = weight_format(self._quantization, min_bits, max_group)
        if gate is not None and weight.shape[0] % self._library.panel_columns[chosen is not None]:
            # The last panel would not have equally many gates and other columns.
            return GatedLinear(self.pack_linear(weight, bias, min_bits, max_group=max_group), self.gate, gate)
        if chosen is not None:
            return NativeLinear(self._library.rounded[chosen], self._memory, weight, bias, gate, num_slices)
        if weight.dtype in self._library.packed_types and weight.shape[1] % 2 == 0:
            if self._lossless is None or weight.dtype != torch.bfloat16:
                return ExactNativeLinear(self._library.plain, self._memory, weight, bias, gate)
            lossless = ExactNativeLinear(self._lossless, self._memory, weight, bias, gate)
            self._plain_bytes += weight.nbytes
            self._lossless_bytes += lossless.num_bytes
            return lossless
        if self._is_deterministic:
            dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self._library.packed_types))
            raise ConfigError(
                f"deterministic needs linear layers of {dtypes} with an even number of inputs, or quantization, and "
                f"one is of {str(weight.dtype).removeprefix('torch.')} with {weight.shape[1]} inputs",
                field="deterministic",
            )
        linear = self._torch.pack_linear(weight, bias)
        return linear if gate is None else GatedLinear(linear, self.gate, gate)

    def _pack_stored(
        self,
        weight: StoredWeight,
        bias: Tensor | None,
        pack_plain: Callable[..., Linear],
        gate: Activation | None = None,
        num_slices: int = 1,
    ) -> Linear:
        """Pack a stored quantised weight for the native kernels; leave forms without a kernel to torch."""
        if weight.input_order is not None:
            linear = self._pack_stored(weight.in_own_order(), bias, pack_plain, gate, num_slices)
            return ReorderedLinear(linear, weight.input_order)
        kernels = self._library.quantized
        if gate is not None and (weight.num_forms > 1 or weight.shape[0] % kernels.panel_columns):
            return GatedLinear(self._pack_stored(weight, bias, pack_plain), self.gate, gate)
        if weight.has_plain:
            return pack_joined(pack_plain, weight, bias)
        if any(kernels.number_of(part.form) < 0 for part in weight.quantized):
            return self._torch.pack_linear(weight, bias, gate=gate)
        return ExactNativeLinear(kernels, self._memory, weight, bias, gate, num_slices)

    def make_lora(self, num_columns: int, max_rank: int | None = None) -> NativeLoraLayer:  # noqa: ARG002 (nothing is captured)
        """Run the adapters of a layer in one call per step."""
        return NativeLoraLayer(self._library, num_columns)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise rows [T, E], which may be strided."""
        num_rows, width = x.shape
        output = x.new_empty(num_rows, width)
        self._library.rms_norm(
            TYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            TYPES[weight.dtype],
            weight.data_ptr(),
            eps,
            num_rows,
            width,
            output.data_ptr(),
        )
        return output

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Apply a gated activation to rows [T, 2 F]."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, width)
        self._library.gate(
            TYPES[gate_up.dtype], ACTIVATIONS[activation], gate_up.data_ptr(), num_rows, width, output.data_ptr()
        )
        return output

    def sigmoid_gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """Multiply rows by the sigmoids of gates."""
        output = torch.empty_like(x)
        self._library.sigmoid_gate(TYPES[x.dtype], x.data_ptr(), gates.data_ptr(), *x.shape, output.data_ptr())
        return output

    def gated_norm(self, x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Gate and normalise rows."""
        return self._torch.gated_norm(x, gates, weight, eps)

    def apply_token_bitmask(self, logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
        """Write minus infinity for forbidden tokens; with AVX-512, without reading logits."""
        if logits.stride(1) != 1:
            return self._torch.apply_token_bitmask(logits, rows, masks)
        masks = [mask.contiguous() for mask in masks]
        places, pointers = array("q", rows), array("Q", [mask.data_ptr() for mask in masks])
        self._library.apply_token_bitmask(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            places.buffer_info()[0],
            len(places),
            pointers.buffer_info()[0],
        )
        return None

    def step_states(self, batch: StateBatch, states: PagedStates) -> StepStates:
        """Use native kernels for sequences with few rows, and torch for others."""
        return NativeStepStates(self._library, batch, states, self)

    def step_attention(self, batch: AttentionBatch, kv: PagedKV) -> StepAttention:
        """Use native attention if the kernels support the cache."""
        if not reads_cache(kv):
            return self._torch.step_attention(batch, kv)
        return NativeStepAttention(self._library, batch, kv, self._is_deterministic)

    def fuse_layers(self, layers: Sequence[PackedLayer], ranks: SharedMemoryRanks | None = None) -> NativeLayers | None:
        """Run all layers of steps of few rows in one call, if all of their matmuls are native."""
        return NativeLayers(self._library, layers, self, self._is_deterministic, ranks) if can_fuse(layers) else None

    def fuse_norm(self, norm: RowNorm, linear: Linear) -> NativeNormedLinear | None:
        """Run a norm and a linear layer in one call, if the matmul is native."""
        # If the layer quantises its inputs, rows and logits are float32; the fused call has the dtype of the model.
        if not isinstance(linear, NativeLinear) or linear.rounds_inputs:
            return None
        return NativeNormedLinear(self._library, norm, linear)

    def fuse_experts(self, experts: RoutedExperts) -> NativeExperts | None:
        """Run the experts of a layer in one call, if all of their matmuls are native."""
        return NativeExperts(self._library, experts) if can_fuse_experts(experts) else None
