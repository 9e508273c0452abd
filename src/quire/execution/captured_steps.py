"""The captured decode steps of a model, where its device and its kernels have them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from quire.distributed.rank_group import RankGroup
from quire.execution.graph_ladder import GraphLadder, limits_of
from quire.execution.kv_storage import Storage
from quire.execution.ranked_capture import RankedCapture, seen_sums
from quire.execution.step_capture import CudaCapture, StepCapture
from quire.execution.tape_capture import TapeCapture
from quire.models.decoder import Decoder
from quire.ops.static_steps import MakesStaticSteps

logger = logging.getLogger(__name__)


class CaptureOptions(NamedTuple):
    """Decode steps to capture.

    Args:
        sizes: numbers of sequences, rising; at least one.
        max_model_len: maximum number of tokens of a sequence.
    """

    sizes: Sequence[int]
    max_model_len: int


@torch.inference_mode()
def make_ladder(
    decoder: Decoder, storages: Sequence[Storage], num_blocks: Sequence[int], block_size: int, options: CaptureOptions
) -> GraphLadder | None:
    """Capture decode steps; the null blocks are written.

    Args:
        decoder: the model.
        storages: memory of its cache groups.
        num_blocks: B of each of them.
        block_size: N.
        options: steps to capture.

    Returns:
        None where a step cannot be captured, which is logged: then every step is launched as it comes.
    """
    if not isinstance(decoder.ops, MakesStaticSteps):
        return None
    limits = limits_of(options.sizes, num_blocks, options.max_model_len, block_size)
    try:
        capture = capture_on(decoder.device, decoder.ranks)
        return GraphLadder(decoder, storages, options.sizes, limits, block_size, capture)
    except RuntimeError as error:
        logger.warning("Decode steps are not captured, but launched kernel by kernel: %s", error)
        return None


def capture_on(device: torch.device, ranks: RankGroup | None = None) -> StepCapture:
    """Return what captures calls on a device: CUDA graphs, or their twin where Triton interprets its kernels.

    Args:
        device: the device.
        ranks: ranks that make the same calls, in which they sum; None for one process.
    """
    if device.type == "cuda":
        capture: StepCapture = CudaCapture(device)
    else:
        from quire.ops.triton.interpreted_launches import seen_launches

        capture = TapeCapture(seen_launches if ranks is None else partial(seen_sums, ranks, seen_launches))
    return capture if ranks is None else RankedCapture(capture, ranks)
