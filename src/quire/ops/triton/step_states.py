"""Recurrence of a step over paged states by Triton kernels; it is a `Recurrence` of `recurrent_mixers.py`."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from quire.ops.interface.ops import PagedStates, StateBatch
from quire.ops.interface.recurrent_weights import SSMHeads
from quire.ops.triton.delta_chunks import correct_in_chunks
from quire.ops.triton.kernels import states as kernels
from quire.ops.triton.launches import Device
from quire.ops.triton.state_chunks import ChunkPlan, StateBatchNumbers, StateChunks
from quire.ops.triton.tiles import MOST_CORRECTED, MOST_SCANNED_FLOAT32, power_of_2

# Channels of a program of a convolution.
CHANNELS: Final = 256
# Elements of a state that one program carries: 32 registers in each of 128 threads.
CARRIED: Final = 4096
# More rows than a sequence has.
ANY_ROWS: Final = 1 << 30


class TritonStepStates:
    """Recurrence of one step over one cache group: its batch is copied to the device once for all layers.

    Short sequences are scanned row by row, long ones in chunks.
    """

    def __init__(self, batch: StateBatch, states: PagedStates, device: Device) -> None:
        self._states = states
        num_seqs = len(batch.block_ids)
        self._num_seqs, self._num_rows = num_seqs, batch.row_starts[-1]
        owners = [seq for seq, (start, end) in enumerate(pairwise(batch.row_starts)) for _ in range(start, end)]
        self._single_rows, self._capability = device.single_rows, device.capability
        plan = ChunkPlan.of(batch.row_starts, device.single_rows)
        row_starts, block_ids, has_state, row_sequences, *parts = device.sections(
            batch.row_starts, batch.block_ids, [int(has_state) for has_state in batch.has_state], owners, *plan
        )
        chunks = StateChunks(*parts) if plan.sequences else None
        has_few_rows = len(plan.sequences) < num_seqs
        self.put_numbers(row_starts, block_ids, has_state, row_sequences, chunks, has_few_rows)

    def put_numbers(
        self,
        row_starts: Tensor,
        block_ids: Tensor,
        has_state: Tensor,
        row_sequences: Tensor,
        chunks: StateChunks | None = None,
        has_few_rows: bool = True,
    ) -> None:
        """Set the batch's tensors, int32 on the device: [S + 1], [S], [S], and the sequence of each row [T]."""
        self._numbers = StateBatchNumbers(row_starts, block_ids, has_state)
        self._row_sequences, self._chunks, self._has_few_rows = row_sequences, chunks, has_few_rows

    def causal_conv(
        self, layer_idx: int, x: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, activation: bool
    ) -> Tensor:
        """Convolve all rows, then store the last inputs."""
        x = _adjoining(x)
        output = x.new_empty(x.shape)
        if not len(x):
            return output
        states, num_channels = self._states.conv_states[layer_idx], x.shape[1]
        per_program = min(CHANNELS, power_of_2(num_channels))
        num_parts = -(-num_channels // per_program)
        strides = x.stride(0), states.stride(0), states.stride(1)
        kernels.convolve_rows[self._num_rows, num_parts](
            output,
            x,
            states,
            conv_weight,
            conv_weight if conv_bias is None else conv_bias,
            self._row_sequences,
            *self._numbers,
            num_channels,
            *strides,
            TAPS=len(conv_weight),
            BIAS=conv_bias is not None,
            SILU=activation,
            CHANNELS=per_program,
        )
        num_columns = len(conv_weight) - 1
        kernels.store_inputs[self._num_seqs, num_parts](
            x,
            states,
            *self._numbers,
            num_channels,
            num_columns,
            *strides,
            COLUMNS=power_of_2(num_columns),
            CHANNELS=per_program,
        )
        return output

    def ssm_scan(self, layer_idx: int, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, heads: SSMHeads) -> Tensor:
        """Scan the rows of each sequence, and update its state."""
        states = self._states.ssm_states[layer_idx]
        _, num_heads, head_dim, state_dim = states.shape
        inputs = _adjoining(x), _adjoining(B), _adjoining(C), _adjoining(dt)
        output = x.new_empty(x.shape, dtype=torch.float32)
        width = power_of_2(state_dim)
        dims = min(power_of_2(head_dim), max(1, CARRIED // width))
        # On an H200, wider 3xTF32 matmuls of state_chunks.py gave wrong results.
        goes_in_chunks = x.dtype != torch.float32 or state_dim <= MOST_SCANNED_FLOAT32
        if len(x) and (self._has_few_rows or not goes_in_chunks):
            kernels.scan[self._num_seqs, num_heads, -(-head_dim // dims)](
                output,
                *inputs,
                *heads,
                states,
                *self._numbers,
                *(part.stride(0) for part in (*inputs, states)),
                HEADS=num_heads,
                SHARE=num_heads * state_dim // B.shape[1],
                HEAD_DIM=head_dim,
                STATE_DIM=state_dim,
                DIM=dims,
                WIDTH=width,
                MOST_ROWS=self._single_rows if goes_in_chunks else ANY_ROWS,
            )
        if self._chunks is not None and goes_in_chunks:
            self._chunks.scan(output, inputs, heads, states, self._numbers)
        return output

    def gated_delta_rule(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Scan the rows of each sequence, long ones in chunks if the keys fit into shared memory."""
        states = self._states.ssm_states[layer_idx]
        _, num_heads, key_dim, value_dim = states.shape
        goes_in_chunks = key_dim <= MOST_CORRECTED
        inputs = _adjoining(q), _adjoining(k), _adjoining(v), _adjoining(g), _adjoining(beta)
        output = v.new_empty(v.shape, dtype=torch.float32)
        keys = power_of_2(key_dim)
        columns = min(power_of_2(value_dim), max(1, CARRIED // keys))
        if len(v) and (self._has_few_rows or not goes_in_chunks):
            kernels.delta_rule[self._num_seqs, num_heads, -(-value_dim // columns)](
                output,
                *inputs,
                states,
                *self._numbers,
                *(part.stride(0) for part in (*inputs, states)),
                HEADS=num_heads,
                SHARE=num_heads * key_dim // k.shape[1],
                KEY_DIM=key_dim,
                VALUE_DIM=value_dim,
                KEYS=keys,
                VALUES=columns,
                MOST_ROWS=self._single_rows if goes_in_chunks else ANY_ROWS,
            )
        if self._chunks is not None and goes_in_chunks:
            correct_in_chunks(self._chunks, output, inputs, states, self._numbers, self._capability)
        return output


def _adjoining(x: Tensor) -> Tensor:
    """Return a matrix with contiguous rows (stride 1 within a row)."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
