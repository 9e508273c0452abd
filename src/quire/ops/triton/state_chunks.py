"""The long sequences of a step, cut into chunks, and the launches of the chunked Mamba 2 scan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from quire.ops.interface.recurrent_weights import SSMHeads
from quire.ops.triton.kernels import state_chunks as kernels
from quire.ops.triton.tiles import power_of_2

# Rows of a chunk: the number of rows of a WGMMA instruction.
CHUNK: Final = 64
# Width of a tile of a row, and the smallest side of `tl.dot`.
PART: Final = 64
LEAST_SIDE: Final = 16
# Elements of a state that one program carries: 16 registers in each of 128 threads; 32 registers would spill.
CARRIED: Final = 2048


class StateBatchNumbers(NamedTuple):
    """A batch's int32 tensors on the device.

    Args:
        row_starts: [S + 1].
        block_ids: [S].
        has_state: [S].
    """

    row_starts: Tensor
    block_ids: Tensor
    has_state: Tensor


class ChunkPlan(NamedTuple):
    """The sequences of a step that are scanned in chunks, and the chunks.

    Args:
        sequences: indices of the sequences, [L].
        first_chunks: first chunk of each of these sequences, then the number of all chunks, [L + 1].
        starts: first row of each chunk, [N].
        ends: end of the rows of each chunk, [N].
    """

    sequences: list[int]
    first_chunks: list[int]
    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, row_starts: Sequence[int], single_rows: int) -> Self:
        """Divide the sequences of more than `single_rows` rows."""
        plan = cls([], [0], [], [])
        for sequence, (start, end) in enumerate(pairwise(row_starts)):
            if end - start > single_rows:
                plan.sequences.append(sequence)
                plan.starts.extend(range(start, end, CHUNK))
                plan.ends.extend(min(chunk_start + CHUNK, end) for chunk_start in range(start, end, CHUNK))
                plan.first_chunks.append(len(plan.starts))
        return plan


class StateChunks(NamedTuple):
    """A `ChunkPlan` as int32 tensors on the device."""

    sequences: Tensor
    first_chunks: Tensor
    starts: Tensor
    ends: Tensor

    def scan(
        self,
        output: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
        heads: SSMHeads,
        states: Tensor,
        batch: StateBatchNumbers,
    ) -> None:
        """Compute `Recurrence.ssm_scan` for these sequences.

        Args:
            output: [T, H * D] of float32.
            inputs: x, B, C and dt.
            states: [block, H, D, N].
        """
        _, num_heads, head_dim, state_dim = states.shape
        shape = len(self.starts), num_heads
        # Decay from the chunk's start to each row, and from each row to the chunk's end, times the row's `dt`; flags of
        # chunks that are not finite.
        decays, flags = output.new_empty(*shape, 2, CHUNK), output.new_empty(shape, dtype=torch.int32)
        width = power_of_2(state_dim, LEAST_SIDE)
        whole = power_of_2(head_dim, LEAST_SIDE)
        tile = min(whole, max(LEAST_SIDE, CARRIED // width))
        strides = [part.stride(0) for part in inputs]
        sizes = {
            "HEADS": num_heads,
            "SHARE": num_heads * state_dim // inputs[1].shape[1],
            "HEAD_DIM": head_dim,
            "STATE_DIM": state_dim,
        }
        kernels.scan_within_chunks[len(self.starts), num_heads](
            output,
            decays,
            flags,
            *inputs,
            *heads,
            self.starts,
            self.ends,
            *strides,
            **sizes,
            DIM=min(whole, PART),
            PART=min(width, PART),
            CHUNK=CHUNK,
            num_warps=4,
            num_stages=2,
        )
        kernels.scan_across_chunks[len(self.sequences), num_heads, -(-head_dim // tile)](
            output,
            decays,
            flags,
            *inputs,
            *heads,
            states,
            *batch,
            self.sequences,
            self.first_chunks,
            *strides,
            states.stride(0),
            **sizes,
            DIM=tile,
            WIDTH=width,
            CHUNK=CHUNK,
            # The smallest tile of a wide state has 4096 elements, which would spill with 4 warps.
            num_warps=4 if width * tile <= CARRIED else 8,
            num_stages=2,
        )
