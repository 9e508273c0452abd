"""Memory of captured steps on a GPU, measured by capturing the largest ones."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from quire.execution.capture.captured_steps import CaptureOptions, capture_steps
from quire.execution.capture.graph_ladder import adapted_sizes, sharing_sizes
from quire.execution.step.kv_storage import make_storages
from quire.models.modules.causal_model import CausalModel


class GraphMemory(NamedTuple):
    """Memory of a GPU before a capture and after it.

    Args:
        free: free bytes.
        reserved: bytes that torch's allocator has reserved.
    """

    free: int
    reserved: int

    @classmethod
    def now(cls) -> GraphMemory:
        """Return the present state, after the allocator's cache was emptied."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return cls(torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved())


class GraphBytes(NamedTuple):
    """Memory that a capture took.

    Args:
        reserved: bytes by which torch's reserved memory grew; other captures reuse them.
        driver: other bytes, which the driver allocated for the captured steps.
    """

    reserved: int = 0
    driver: int = 0

    @classmethod
    def between(cls, before: GraphMemory, after: GraphMemory) -> GraphBytes:
        """Return the memory that was taken between two moments."""
        reserved = max(0, after.reserved - before.reserved)
        return cls(reserved, max(0, before.free - after.free - reserved))


class NumGraphs(NamedTuple):
    """Numbers of captured steps.

    Args:
        decodes: decode steps of all sizes.
        measured: decode steps that are measured, of the largest size.
        pieces: steps in pieces; the largest one is measured.
    """

    decodes: int
    measured: int
    pieces: int


def measure_graph_bytes(
    decoder: CausalModel, options: CaptureOptions, block_size: int, dtype: torch.dtype, stored: str | None = None
) -> int:
    """Capture the largest steps on a GPU, and return the bytes that captured steps of all sizes take; 0 without sizes.

    Args:
        decoder: decoder on a GPU, with all its weights.
        options: steps to capture.
        block_size: N.
        dtype: dtype of the weights.
        stored: see `KVStorage`.
    """
    num_blocks = [2] * len(decoder.cache_groups)
    storages = make_storages(decoder.cache_groups, num_blocks, block_size, dtype, torch.device("cuda"), stored)

    def measure(largest: CaptureOptions) -> GraphBytes:
        taken = GraphBytes()
        # The first capture also loads kernels, which stay in memory: the second one is measured.
        for _ in range(2):
            before = GraphMemory.now()
            captured = capture_steps(decoder, storages, num_blocks, block_size, largest)
            if captured is None:
                return GraphBytes()
            taken = GraphBytes.between(before, GraphMemory.now())
            del captured
        return taken

    sizes, piece_sizes = options.sizes, options.piece_sizes
    num_decodes, num_measured = (
        len(each) + len(sharing_sizes(each)) + len(adapted_sizes(decoder, each)) for each in (sizes, sizes[-1:])
    )
    decodes = measure(options._replace(sizes=sizes[-1:], piece_sizes=())) if sizes else GraphBytes()
    # Captured together, since pieces reuse the memory pool of decodes.
    both = decodes
    if piece_sizes:
        both = measure(options._replace(sizes=sizes[-1:], piece_sizes=piece_sizes[-1:]))
    taken = graph_bytes(decodes, both, NumGraphs(num_decodes, num_measured, len(piece_sizes)))
    if decodes != GraphBytes():
        tables = sizes[-1] * -(-options.max_model_len // block_size) * torch.int64.itemsize
        taken += tables * len(num_blocks)
    return taken


def graph_bytes(decodes: GraphBytes, both: GraphBytes, num_graphs: NumGraphs) -> int:
    """Return the bytes of all captured steps from the bytes of the largest, whose memory pool smaller ones reuse."""
    of_decodes = -(-decodes.driver * num_graphs.decodes // max(1, num_graphs.measured))
    return both.reserved + of_decodes + max(0, both.driver - decodes.driver) * num_graphs.pieces
