"""Memory of captured decode steps on a GPU, measured by capturing the largest one."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from quire.execution.captured_steps import CaptureOptions, make_ladder
from quire.execution.graph_ladder import sharing_sizes
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
    """Capture the largest decode step on a GPU, and return what the captured steps of all sizes take.

    Args:
        decoder: decoder on a GPU, with all its weights.
        options: steps to capture.
        block_size: N.
        dtype: dtype of the weights.
        stored: see `KVStorage`.
    """
    largest = options._replace(sizes=options.sizes[-1:])
    num_blocks = [2] * len(decoder.cache_groups)
    storages = make_storages(decoder.cache_groups, num_blocks, block_size, dtype, torch.device("cuda"), stored)
    taken = 0
    # The first capture also loads kernels, which stay.
    for _ in range(2):
        before = GraphMemory.now()
        ladder = make_ladder(decoder, storages, num_blocks, block_size, largest)
        if ladder is None:
            return 0
        captures = len(options.sizes) + len(sharing_sizes(options.sizes))
        taken = graph_bytes(before, GraphMemory.now(), captures, len(sharing_sizes(largest.sizes)) + 1)
        del ladder
    tables = largest.sizes[0] * -(-options.max_model_len // block_size) * torch.int64.itemsize
    return taken + tables * len(num_blocks)


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
