"""The backend of compiled kernels, for CPUs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.config import Quantization
from quire.errors import ConfigError
from quire.ops.captures import CapturedLayers
from quire.ops.gated import GatedLinear
from quire.ops.interface import (
    Activation,
    AttentionBatch,
    HeadNorms,
    Layers,
    Linear,
    PagedKV,
    PagedStates,
    Rotation,
    StateBatch,
    StepAttention,
    StepStates,
)
from quire.ops.native_library import ACTIVATIONS, MAX_HEAD_DIM, TYPES, Cache, NativeLibrary, StepRows
from quire.ops.native_linear import ExactNativeLinear, NativeLinear
from quire.ops.torch_ops import TorchOps
from quire.ops.weight_formats import weight_format
from quire.ops.weight_memory import WeightMemory


class NativeOps:
    """Compiled kernels, but for look-ups, for recurrence, and for the matrix products that oneDNN computes as fast.

    Args:
        library: that this processor runs.
        quantization: what the weights of linear layers are rounded to.
        is_lossless: whether bfloat16 weights that are not rounded are packed to three quarters, where the library has
            kernels for that.
        deterministic: a row gets the same bits whatever rows it comes with. Linear layers, norms and gates compute so
            anyway; attention takes the path of many rows for all, and shares whole parts only.
    """

    def __init__(
        self,
        library: NativeLibrary,
        quantization: Quantization | None = None,
        is_lossless: bool = False,
        deterministic: bool = False,
    ) -> None:
        self._library = library
        self._quantization = quantization
        self._lossless = library.lossless if is_lossless else None
        self._plain_bytes = self._lossless_bytes = 0
        self._is_deterministic = deterministic
        self._memory = WeightMemory()
        self._torch = TorchOps(torch.device("cpu"))
        self._noted: list[NativeStepAttention] | None = None

    @property
    def name(self) -> str:
        """What computes, for people."""
        packed = f", weights packed lossless to {self.lossless_share:.1%}" if self._plain_bytes else ""
        return f"native ({self._library.level}){packed}" + (", deterministic" if self._is_deterministic else "")

    @property
    def lossless_share(self) -> float:
        """Bytes of all lossless weights so far, tables included, divided by their bytes before; 1 without any."""
        return self._lossless_bytes / self._plain_bytes if self._plain_bytes else 1.0

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, min_bits: int = 4, gate: Activation | None = None
    ) -> Linear:
        """Round, or pack for the kernels where they are faster, else for oneDNN.

        Raises:
            ConfigError: the ops are to be deterministic, and oneDNN, which adds up differently for other numbers of
                rows, would have to compute.
        """
        chosen = weight_format(self._quantization, weight.shape[1], min_bits)
        if gate is not None and weight.shape[0] % self._library.panel_columns[chosen is not None]:
            # A panel would not have as many gates as other columns.
            return GatedLinear(self.pack_linear(weight, bias, min_bits), self.gate, gate)
        if chosen is not None:
            return NativeLinear(self._library.weight_kernels[chosen], self._memory, weight, bias, gate)
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

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Look up rows."""
        return self._torch.embedding(ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise rows [T, E], which may lie apart."""
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
        """Gate rows [T, 2 F]."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, width)
        self._library.gate(
            TYPES[gate_up.dtype], ACTIVATIONS[activation], gate_up.data_ptr(), num_rows, width, output.data_ptr()
        )
        return output

    def gated_norm(self, x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Gate and normalise rows."""
        return self._torch.gated_norm(x, gates, weight, eps)

    def apply_token_bitmask(self, logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
        """Write minus infinities where they belong; with AVX-512, read no logits."""
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
        """Leave recurrence to torch."""
        return self._torch.step_states(batch, states)

    def step_attention(self, batch: AttentionBatch, kv: PagedKV) -> StepAttention:
        """Attend natively, but for what kernels do not take: heads of over 256 values, odd ones, other dtypes."""
        is_known = kv.data.dtype in (kv.dtype, torch.int8)
        if kv.head_dim > MAX_HEAD_DIM or kv.head_dim % 2 or not is_known:
            return self._torch.step_attention(batch, kv)
        step = NativeStepAttention(self._library, batch, kv, self._is_deterministic)
        if self._noted is not None:
            self._noted.append(step)
        return step

    def captured(self, layers: Layers) -> CapturedLayers:
        """Run steps of few rows in one call, where all that they compute are kernels of these."""
        return CapturedLayers(layers, self._library.captures, self._noting)

    @contextmanager
    def _noting(self) -> Iterator[Sequence[NativeStepAttention]]:
        noted: list[NativeStepAttention] = []
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = None


class AttentionPlan:
    """How a step's attention is cut into jobs, for all layers with as many query heads a KV head.

    Args:
        rows: a pointer to the step's `StepRows`.
        cache: a pointer to its `Cache`.
        group: query heads of a KV head.
        batch: of the step.
        deterministic: see `NativeOps`.

    Attributes:
        handle: a pointer for `NativeLibrary.attend`.
    """

    __slots__ = ("_free", "_replan", "_tokens_read", "handle")

    def __init__(
        self, library: NativeLibrary, rows: Any, cache: Any, group: int, batch: AttentionBatch, deterministic: bool
    ) -> None:
        self._free, self._tokens_read = library.free_attention_plan, library.tokens_read
        sight = batch.window or 0, batch.chunk or 0
        self.handle = library.plan_attention(rows, cache, group, *sight, deterministic)
        self._replan = partial(library.replan_attention, self.handle, rows, cache)

    def follow(self) -> None:
        """Become the plan of what `rows` says now; `handle` stays."""
        self._replan()

    def __del__(self) -> None:
        self._free(self.handle)

    @property
    def tokens_read(self) -> int:
        """Tokens whose keys and values each KV head reads in a layer, as often as it reads them."""
        return int(self._tokens_read(self.handle))


class NativeStepAttention:
    """Attention of one step over one cache group, read straight from its block tables.

    What sequences share is read once for as many of their rows as a job takes, however their tables branch.

    Attributes:
        batch: of the step.
    """

    def __init__(self, library: NativeLibrary, batch: AttentionBatch, kv: PagedKV, deterministic: bool = False) -> None:
        self._num_kv_heads, block_size = kv.data.shape[3:5]
        self._head_dim = kv.head_dim
        self._library = library
        self._is_deterministic = deterministic
        self._plans: dict[int, AttentionPlan] = {}
        self._step_rows = StepRows()
        self._rows = byref(self._step_rows)
        self._point_to(batch)
        self._kv: PagedKV | None = kv  # what the pointers below point into
        strides = [kv.data.stride(dim) * kv.data.itemsize for dim in (0, 1, 4)]
        place = (kv.data.data_ptr(), TYPES[kv.dtype], kv.data.dtype == torch.int8, *strides)
        self._cache = byref(Cache(*place, self._num_kv_heads, block_size, self._head_dim))
        self._no_cache = byref(Cache(*place, 0, block_size, self._head_dim))  # without heads: nothing is stored

    def _point_to(self, batch: AttentionBatch) -> None:
        numbers = [array("q", part) for part in (batch.row_starts, batch.context_lens, batch.block_starts)]
        self.batch, self._numbers = batch, numbers  # what the pointers point into
        self._num_rows = batch.row_starts[-1]
        rows = self._step_rows
        rows.num_seqs = len(batch.context_lens)
        rows.row_starts, rows.context_lens, rows.block_starts = [part.buffer_info()[0] for part in numbers]
        rows.block_ids, rows.slot_mapping = batch.block_ids.data_ptr(), batch.slot_mapping.data_ptr()

    def rebind(self, batch: AttentionBatch) -> None:
        """Become another step's, over the same cache and as far back; calls that were made before are then for it.

        From now on the cache is the caller's to keep.
        """
        self._kv = None
        self._point_to(batch)
        for plan in self._plans.values():
            plan.follow()

    def prepare(self, layer_idx: int, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm heads, rotate queries and keys, store keys and values; return the queries [T, H, D]."""
        num_heads = qkv.shape[1] // self._head_dim - 2 * self._num_kv_heads
        return self._prepare(self._cache, layer_idx, qkv, num_heads, norms, rotation)

    def prepare_queries(self, q: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm and rotate queries; return them as [T, H, D]."""
        return self._prepare(self._no_cache, 0, q, q.shape[1] // self._head_dim, norms, rotation)

    def _prepare(
        self, cache: Any, layer_idx: int, heads: Tensor, num_heads: int, norms: HeadNorms | None, rotation: Rotation
    ) -> Tensor:
        queries = heads.new_empty(self._num_rows, num_heads, self._head_dim)
        scale_type, scales, num_normed, eps = TYPES[heads.dtype], None, 0, 0.0
        if norms is not None:
            scale_type, scales, num_normed = TYPES[norms.scales.dtype], norms.scales.data_ptr(), len(norms.scales)
            eps = norms.eps
        self._library.prepare(
            self._rows,
            cache,
            layer_idx,
            heads.data_ptr(),
            scale_type,
            scales,
            num_normed,
            eps,
            rotation.cos.data_ptr(),
            rotation.sin.data_ptr(),
            num_heads,
            queries.data_ptr(),
        )
        return queries

    def attend(self, layer_idx: int, q: Tensor, scale: float) -> Tensor:
        """Let each row of [T, H, D] see its sequence up to itself; return [T, H * D]."""
        num_rows, num_heads, head_dim = q.shape
        output = q.new_empty(num_rows, num_heads * head_dim)
        handle = self.plan(num_heads).handle
        self._library.attend(
            self._rows, self._cache, handle, layer_idx, q.data_ptr(), q.stride(0), scale, output.data_ptr()
        )
        return output

    def plan(self, num_heads: int) -> AttentionPlan:
        """Return the plan of layers with so many query heads."""
        group = num_heads // self._num_kv_heads
        plan = self._plans.get(group)
        if plan is None:
            plan = AttentionPlan(self._library, self._rows, self._cache, group, self.batch, self._is_deterministic)
            self._plans[group] = plan
        return plan
