"""The captured steps of a model, where its device and its kernels have them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from quire.distributed.rank_group import RankGroup
from quire.execution.graph_ladder import GraphLadder, limits_of
from quire.execution.kv_storage import Storage
from quire.execution.piecewise_ladder import PiecewiseLadder
from quire.execution.ranked_capture import RankedCapture, seen_sums
from quire.execution.step_capture import CudaCapture, StepCapture
from quire.execution.tape_capture import TapeCapture
from quire.models.decoder import Decoder
from quire.ops.static_steps import MakesStaticSteps

logger = logging.getLogger(__name__)


class CaptureOptions(NamedTuple):
    """Steps to capture.

    Args:
        sizes: numbers of sequences of decode steps, rising.
        max_model_len: maximum number of tokens of a sequence.
        piece_sizes: numbers of tokens of other steps, whose pieces between attention are captured, rising.
    """

    sizes: Sequence[int]
    max_model_len: int
    piece_sizes: Sequence[int] = ()


class CapturedSteps(NamedTuple):
    """The captured steps of a model.

    Args:
        ladder: decode steps; None for none.
        pieces: pieces of other steps; None for none.
    """

    ladder: GraphLadder | None = None
    pieces: PiecewiseLadder | None = None


@torch.inference_mode()
def capture_steps(
    decoder: Decoder, storages: Sequence[Storage], num_blocks: Sequence[int], block_size: int, options: CaptureOptions
) -> CapturedSteps:
    """Capture steps; the null blocks are written.

    Args:
        decoder: the model.
        storages: memory of its cache groups.
        num_blocks: B of each of them.
        block_size: N.
        options: steps to capture.

    Returns:
        None in place of what cannot be captured, which is logged: such steps are launched as they come.
    """
    if not isinstance(decoder.ops, MakesStaticSteps):
        return CapturedSteps()
    ladder, pieces, kind = None, None, "Decode steps"
    try:
        capture = capture_on(decoder.device, decoder.ranks)
        if options.sizes:
            limits = limits_of(options.sizes, num_blocks, options.max_model_len, block_size)
            ladder = GraphLadder(decoder, storages, options.sizes, limits, block_size, capture)
        kind = "Steps with prompts"
        if options.piece_sizes:
            pieces = PiecewiseLadder(decoder, storages, options.piece_sizes, capture)
    except RuntimeError as error:
        logger.warning("%s are not captured, but launched kernel by kernel: %s", kind, error)
    return CapturedSteps(ladder, pieces)


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
