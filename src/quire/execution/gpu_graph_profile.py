"""Memory of captured steps on a GPU, measured by capturing the largest ones."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from quire.execution.captured_steps import CapturedSteps, CaptureOptions, capture_steps
from quire.execution.graph_ladder import adapted_sizes, sharing_sizes
from quire.execution.kv_storage import make_storages
from quire.models.decoder import Decoder


class GraphMemory(NamedTuple):
    """Memory of a GPU before a capture and after it.

    Args:
        free: bytes that nobody has.
        reserved: bytes that torch has from the driver.
    """

    free: int
    reserved: int

    @classmethod
    def now(cls) -> GraphMemory:
        """Return the memory as it is."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return cls(torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved())


def measure_graph_bytes(
    decoder: Decoder, options: CaptureOptions, block_size: int, dtype: torch.dtype, stored: str | None = None
) -> int:
    """Capture the largest steps on a GPU, and return what the captured steps of all sizes take.

    Args:
        decoder: decoder on a GPU, with all its weights.
        options: steps to capture.
        block_size: N.
        dtype: dtype of the weights.
        stored: see `KVStorage`.
    """
    num_blocks = [2] * len(decoder.cache_groups)
    storages = make_storages(decoder.cache_groups, num_blocks, block_size, dtype, torch.device("cuda"), stored)

    def measure(largest: CaptureOptions, num_captures: int, num_measured: int) -> int:
        taken = 0
        # The first capture also loads kernels, which stay.
        for _ in range(2):
            before = GraphMemory.now()
            captured = capture_steps(decoder, storages, num_blocks, block_size, largest)
            if captured == CapturedSteps():
                return 0
            taken = graph_bytes(before, GraphMemory.now(), num_captures, num_measured)
            del captured
        return taken

    sizes, piece_sizes = options.sizes, options.piece_sizes
    taken = measure(options._replace(sizes=(), piece_sizes=piece_sizes[-1:]), len(piece_sizes), 1) if piece_sizes else 0
    if sizes:
        num_captures, num_measured = (
            len(each) + len(sharing_sizes(each)) + len(adapted_sizes(decoder, each)) for each in (sizes, sizes[-1:])
        )
        decodes = measure(options._replace(sizes=sizes[-1:], piece_sizes=()), num_captures, num_measured)
        if decodes:
            tables = sizes[-1] * -(-options.max_model_len // block_size) * torch.int64.itemsize
            taken += decodes + tables * len(num_blocks)
    return taken


def graph_bytes(before: GraphMemory, after: GraphMemory, num_captures: int, num_measured: int = 1) -> int:
    """Return the memory of captured steps from what the largest took: smaller ones lie in its memory.

    The driver has some for each, beside what torch knows.

    Args:
        before, after: memory before the largest were captured, and after.
        num_captures: number of captured steps.
        num_measured: number of those that were captured between the two.
    """
    reserved = max(0, after.reserved - before.reserved)
    driver = max(0, before.free - after.free - reserved)
    return reserved + -(-driver * num_captures // num_measured)
