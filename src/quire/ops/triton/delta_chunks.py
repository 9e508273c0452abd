"""Launches of the chunked gated delta rule over the long sequences of a step."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quire.ops.triton.kernels import delta_chunks as kernels
from quire.ops.triton.state_chunks import CHUNK, LEAST_SIDE, StateBatchNumbers, StateChunks
from quire.ops.triton.tiles import correction_tile, power_of_2

# Width of a tile of a row: 64 would spill no more registers on Hopper, but many on earlier GPUs.
PART: Final = 32


def correct_in_chunks(
    chunks: StateChunks,
    output: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    states: Tensor,
    batch: StateBatchNumbers,
    capability: tuple[int, int],
) -> None:
    """Compute `Recurrence.gated_delta_rule` for the sequences in `chunks`.

    Args:
        output: [T, H * V] of float32.
        inputs: q, k, v, g and beta.
        states: [block, H, K, V]; K is no more than `MOST_CORRECTED`.
        capability: compute capability of the GPU.
    """
    _, num_heads, key_dim, value_dim = states.shape
    num_chunks, num_groups = len(chunks.starts), inputs[1].shape[1] // key_dim
    keys = power_of_2(key_dim, LEAST_SIDE)
    tile = correction_tile(power_of_2(value_dim, LEAST_SIDE), capability)
    # `pairs`: high and low terms of keys and of queries; `squares`: of the inverse matrices and the scores.
    pairs = output.new_empty(num_chunks, num_groups, 4, CHUNK, keys, dtype=torch.float16)
    squares = output.new_empty(num_chunks, num_heads, 4, CHUNK, CHUNK, dtype=torch.float16)
    # `decays`: from the chunk's start to each row, from each row to the chunk's end, and scales of queries. `flags`: 1
    # for a chunk that is computed row by row.
    decays = output.new_empty(num_chunks, num_heads, 3, CHUNK)
    flags = output.new_empty(num_chunks, num_heads, dtype=torch.int32)
    strides = [part.stride(0) for part in inputs]
    sizes = {
        "HEADS": num_heads,
        "SHARE": num_heads // num_groups,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEYS": keys,
    }
    kernels.correct_within_chunks[num_chunks, num_heads](
        pairs,
        squares,
        decays,
        flags,
        *inputs,
        chunks.starts,
        chunks.ends,
        *strides,
        **sizes,
        PART=min(keys, PART),
        CHUNK=CHUNK,
        LEVELS=CHUNK.bit_length() - 1,
        num_warps=4,
        num_stages=1,
    )
    kernels.correct_across_chunks[len(chunks.sequences), num_heads, -(-value_dim // tile.columns)](
        output,
        pairs,
        squares,
        decays,
        flags,
        *inputs,
        states,
        *batch,
        chunks.sequences,
        chunks.first_chunks,
        *strides,
        states.stride(0),
        **sizes,
        VALUES=tile.columns,
        CHUNK=CHUNK,
        num_warps=4,
        num_stages=tile.num_stages,
    )
