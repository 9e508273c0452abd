"""The captured steps of a model, if its device and its kernels support capture."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.execution.capture.captured_passes import CapturedPass, DraftPass, MTPPass, StepPass
from quire.execution.capture.decode_rows import few_rows_of
from quire.execution.capture.graph_ladder import GraphLadder, ReplayedStep, limits_of
from quire.execution.capture.piecewise_ladder import PiecewiseLadder
from quire.execution.capture.ranked_capture import RankedCapture, seen_sums
from quire.execution.capture.step_capture import CudaCapture, StepCapture
from quire.execution.capture.tape_capture import TapeCapture
from quire.execution.step.adapter_rows import AdapterRows
from quire.execution.step.batch import BatchBuilder
from quire.execution.step.kv_storage import Storage
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.decoder import Decoder
from quire.models.modules.mtp import MTPHead
from quire.ops.interface.static_steps import MakesStaticSteps
from quire.scheduling.decode_columns import DecodeItems
from quire.scheduling.plan import ScheduledSequence

logger = logging.getLogger(__name__)


class CaptureOptions(NamedTuple):
    """Steps to capture.

    Args:
        sizes: numbers of rows of decode steps, ascending; a row is a sequence, or a draft token to verify.
        max_model_len: maximum number of tokens of a sequence.
        piece_sizes: numbers of tokens of other steps, whose pieces between attention are captured, ascending.
        max_num_seqs: maximum number of sequences of a step; None without a draft model.
        makes_drafts: the steps are passes of a draft model, which return tokens instead of logits.
    """

    sizes: Sequence[int]
    max_model_len: int
    piece_sizes: Sequence[int] = ()
    max_num_seqs: int | None = None
    makes_drafts: bool = False

    def of_draft(self) -> CaptureOptions:
        """Return the options for a draft model or an MTP head, whose passes have one row per sequence."""
        num_sizes = len(self.sizes) if self.max_num_seqs is None else bisect_left(self.sizes, self.max_num_seqs) + 1
        return CaptureOptions(self.sizes[:num_sizes], self.max_model_len, makes_drafts=True)


class CapturedSteps:
    """The captured steps of a model, which its runner tries before it computes a step itself."""

    def __init__(self, ladder: GraphLadder | None = None, pieces: PiecewiseLadder | None = None) -> None:
        self.ladder, self.pieces = ladder, pieces
        self.num_replayed = self.num_replayed_in_pieces = 0

    def replay(
        self, items: Sequence[ScheduledSequence], builder: BatchBuilder, adapters: AdapterRows
    ) -> ReplayedStep | None:
        """Replay a step in which all sequences sample and have few tokens: decodes, and drafts to verify."""
        ladder = self.ladder
        found = few_rows_of(items) if ladder is not None and _can_replay(items) else None
        if ladder is None or found is None:
            return None
        rows, counts = found
        adapted = adapters.rows_of_decodes(rows) if adapters.by_sequence else None
        if not ladder.takes(rows) or (adapted is not None and not ladder.takes_adapters(adapted)):
            return None
        self.num_replayed += 1
        return ladder.run(rows, builder, adapted, counts)

    def forget_rows(self) -> None:
        """Forget the last step's block tables: a step that is not replayed as a whole may change them."""
        if self.ladder is not None:
            self.ladder.forget_rows()

    def replay_pieces(
        self, items: Sequence[ScheduledSequence], builder: BatchBuilder, adapters: AdapterRows, groups: range
    ) -> Tensor | None:
        """Replay the pieces of a step between attention; return the hidden states of all rows, or None as `replay`."""
        pieces, adapted = self.pieces, adapters.by_sequence
        if pieces is None or (adapted and any(item.seq_id in adapted for item in items)):
            return None
        if not pieces.takes(sum(len(item.token_ids) for item in items)):
            return None
        self.num_replayed_in_pieces += 1
        return pieces.run(builder.lay_out(items, groups))


def _can_replay(items: Sequence[ScheduledSequence]) -> bool:
    """Return whether all items sample tokens, and none is a prompt."""
    if isinstance(items, DecodeItems):
        return True
    num_samples, new_sequences = tuple(zip(*items, strict=True))[4:6]
    # The runner has opened new sequences; a new sequence that starts at position 0 is a prompt.
    is_known = new_sequences.count(None) == len(items)
    return all(num_samples) and (is_known or all(item.new_sequence is None or item.start for item in items))


def has_captured_passes(draft: CausalModel) -> bool:
    """Return whether the passes of a draft model or an MTP head are captured: not on several ranks."""
    return draft.ranks is None and draft.replicas is None


@torch.inference_mode()
def capture_steps(
    decoder: CausalModel,
    storages: Sequence[Storage],
    num_blocks: Sequence[int],
    block_size: int,
    options: CaptureOptions,
    first_group: int = 0,
) -> CapturedSteps | None:
    """Capture steps, which writes to the null blocks; return None if nothing can be captured."""
    # Modules of transformers may read values of tensors on the host.
    if not isinstance(decoder.ops, MakesStaticSteps) or not isinstance(decoder, Decoder):
        return None
    if isinstance(decoder, MTPHead):  # its last group has hidden states of the target, which no captured pass reads
        storages, num_blocks = storages[:-1], num_blocks[:-1]
    ladder, pieces, kind = None, None, "Decode steps"
    try:
        capture = capture_on(decoder.device, decoder.ranks)
        if options.sizes:
            limits = limits_of(options.sizes, num_blocks, options.max_model_len, block_size)
            computed = _pass_of(decoder, storages, options)
            ladder = GraphLadder(decoder, storages, options.sizes, limits, block_size, capture, computed, first_group)
        kind = "Steps with prompts"
        if options.piece_sizes:
            pieces = PiecewiseLadder(decoder, storages, options.piece_sizes, capture)
    except RuntimeError as error:
        logger.warning("%s are not captured, but launched kernel by kernel: %s", kind, error)
    return None if ladder is None and pieces is None else CapturedSteps(ladder, pieces)


def _pass_of(decoder: Decoder, storages: Sequence[Storage], options: CaptureOptions) -> CapturedPass:
    if isinstance(decoder, MTPHead):
        return MTPPass(decoder, storages)
    return DraftPass(decoder, storages) if options.makes_drafts else StepPass(decoder, storages)


def capture_on(device: torch.device, ranks: RankGroup | None = None) -> StepCapture:
    """Return the capture for a device: CUDA graphs, or a tape of launches if Triton interprets its kernels."""
    if device.type == "cuda":
        capture: StepCapture = CudaCapture(device)
    else:
        from quire.ops.triton.interpreted_launches import seen_launches

        capture = TapeCapture(seen_launches if ranks is None else partial(seen_sums, ranks, seen_launches))
    return capture if ranks is None else RankedCapture(capture, ranks)
