"""Recurrence of a step by native kernels, for sequences with few rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from ctypes import addressof, byref
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor

from quire.ops.cpu.native_library import MAX_ROWS, TYPES, NativeLibrary
from quire.ops.cpu.native_structures import ConvolutionCall, GatedDeltaNetCall, ShortConvCall, StateCache, StateRows
from quire.ops.interface.ops import Ops, PagedStates, StateBatch, StepStates
from quire.ops.interface.recurrent_weights import GatedDeltaNetWeights, Mamba2Weights, ShortConvWeights
from quire.ops.pytorch.recurrent_mixers import RecurrentMixers
from quire.ops.pytorch.torch_states import TorchStepStates


class NativeStepStates:
    """Recurrence of one step over one cache group.

    A sequence with few rows is computed by a native kernel, one with more by torch, in chunks with matmuls. Only its
    own number of rows decides, so that the other sequences of a step do not change a result.
    """

    def __init__(self, library: NativeLibrary, batch: StateBatch, states: PagedStates, ops: Ops) -> None:
        self._library, self._batch, self._states, self._ops = library, batch, states, ops
        counts = [end - start for start, end in pairwise(batch.row_starts)]
        few = [idx for idx, count in enumerate(counts) if count <= MAX_ROWS]
        # The pointers below point into these arrays.
        self._numbers = [
            array("q", (part[idx] for idx in few))
            for part in (batch.block_ids, batch.row_starts, counts, batch.has_state)
        ]
        self._rows = StateRows(len(few), *(part.buffer_info()[0] for part in self._numbers))
        conv, sums = states.conv_states, states.ssm_states[0]
        layer_stride = conv[1].data_ptr() - conv[0].data_ptr() if len(conv) > 1 else 0
        strides = conv[0].stride(0) * conv[0].itemsize, layer_stride, conv[0].shape[1]
        self._cache = StateCache(conv[0].data_ptr(), sums.data_ptr(), *strides)

    def pointers(self, _: int) -> tuple[int, int, int]:
        """Return the addresses of rows and cache, and 0 in place of an attention plan."""
        return addressof(self._rows), addressof(self._cache), 0

    def short_conv(self, layer_idx: int, projected: Tensor, weights: ShortConvWeights) -> Tensor:
        """Run the short convolution, natively for sequences with few rows."""
        call = self._library.short_conv, short_conv_call(weights)
        return self._run(
            *call, layer_idx, projected, weights.taps.shape[1], lambda step, x: step.short_conv(layer_idx, x, weights)
        )

    def gated_delta_net(self, layer_idx: int, projected: Tensor, weights: GatedDeltaNetWeights) -> Tensor:
        """Run the gated delta net, natively and row by row for sequences with few rows."""
        call = self._library.gated_delta_net, gated_delta_net_call(weights)
        inner = len(weights.A) * len(weights.norm_scales)
        return self._run(
            *call, layer_idx, projected, inner, lambda step, x: step.gated_delta_net(layer_idx, x, weights)
        )

    def mamba2(self, layer_idx: int, projected: Tensor, weights: Mamba2Weights) -> Tensor:
        """Run the scan with torch."""
        return self._torch.mamba2(layer_idx, projected, weights)

    def _run(
        self,
        kernel: Callable[..., Any],
        weights: Any,
        layer_idx: int,
        projected: Tensor,
        width: int,
        run_long: Callable[[StepStates, Tensor], Tensor],
    ) -> Tensor:
        """Return the outputs [T, width]: by a native kernel for sequences with few rows, by torch for others."""
        output = projected.new_empty(len(projected), width)
        if self._rows.num_seqs:
            pointers = projected.data_ptr(), output.data_ptr()
            kernel(TYPES[projected.dtype], byref(self._rows), byref(self._cache), layer_idx, byref(weights), *pointers)
        for rows, step in self._long:
            output[rows] = run_long(step, projected[rows])
        return output

    @cached_property
    def _long(self) -> list[tuple[slice, StepStates]]:
        """Rows of each sequence with many rows, and the step that computes them."""
        batch = self._batch
        spans = zip(batch.block_ids, pairwise(batch.row_starts), batch.has_state, strict=True)
        return [
            (slice(start, end), self._by_torch(StateBatch([block_id], [0, end - start], [has_state])))
            for block_id, (start, end), has_state in spans
            if end - start > MAX_ROWS
        ]

    @cached_property
    def _torch(self) -> StepStates:
        return self._by_torch(self._batch)

    def _by_torch(self, batch: StateBatch) -> StepStates:
        return RecurrentMixers(TorchStepStates(batch, self._states), self._ops)


def short_conv_call(weights: ShortConvWeights) -> ShortConvCall:
    """Return the structure of a short convolution, which points into the weights."""
    return ShortConvCall(_convolution(*weights))


def gated_delta_net_call(weights: GatedDeltaNetWeights) -> GatedDeltaNetCall:
    """Return the structure of a gated delta net, which points into the weights."""
    return GatedDeltaNetCall(
        _convolution(weights.taps, None),
        *(tensor.data_ptr() for tensor in (weights.A, weights.dt_bias, weights.norm_scales)),
        weights.norm_eps,
        weights.num_key_heads,
        len(weights.A),
        weights.key_dim,
        len(weights.norm_scales),
    )


def _convolution(taps: Tensor, bias: Tensor | None) -> ConvolutionCall:
    return ConvolutionCall(taps.data_ptr(), None if bias is None else bias.data_ptr(), taps.shape[1])
