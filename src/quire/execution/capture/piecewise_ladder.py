"""Piecewise captured steps with prompts (the layers between attention), for a ladder of numbers of rows."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.execution.capture.step_capture import CapturedCall, StepCapture
from quire.execution.step.batch import Batch
from quire.execution.step.kv_storage import Storage
from quire.models.modules.decoder import Decoder
from quire.models.specs.spec import StateCacheShape
from quire.ops.interface.ops import StateBatch
from quire.ops.interface.piecewise_steps import PiecewiseAttentionBatch, PiecewiseStateBatch, SeamMemory, SplitOp

logger = logging.getLogger(__name__)


class PiecewiseStep(NamedTuple):
    """A captured step of one number of rows.

    Args:
        size: number of rows.
        pieces: captured calls, one more than `split_ops`.
        split_ops: the operations between the pieces, run eagerly, each with the index of its cache group.
    """

    size: int
    pieces: Sequence[CapturedCall]
    split_ops: Sequence[tuple[int, SplitOp]]


class PiecewiseLadder:
    """The captured steps of a model over its KV memory: a step is padded to, and replays, the next larger size.

    ```
     rows   | a step's rows, n of them: prompts, decodes | padding: token 0 at position 0, in the null block |
    ```
    """

    def __init__(
        self, decoder: Decoder, storages: Sequence[Storage], sizes: Sequence[int], capture: StepCapture
    ) -> None:
        self._decoder, self._storages = decoder, storages
        most, device = sizes[-1], decoder.device
        self._is_state = [isinstance(group.cache, StateCacheShape) for group in decoder.cache_groups]
        # Token ids and positions, then the slots of each cache group of tokens.
        self._numbers = torch.zeros(2 + self._is_state.count(False), most, dtype=torch.int64, device=device)
        self._seams = SeamMemory(most, device)
        self._hidden = torch.zeros(most, decoder.spec.width, dtype=decoder.dtype, device=device)
        # The largest graph is captured first: the others reuse its memory pool.
        self._steps = [self._capture(size, capture) for size in reversed(sizes)][::-1]
        self._sizes = list(sizes)
        logger.info("Captured steps with prompts, in pieces, of %s tokens", ", ".join(map(str, sizes)))

    def _capture(self, size: int, capture: StepCapture) -> PiecewiseStep:
        split_ops: list[tuple[int, SplitOp]] = []

        def run(split: Callable[[], None]) -> None:
            split_ops.clear()

            def split_at(group_idx: int, split_op: SplitOp) -> None:
                split_ops.append((group_idx, split_op))
                split()

            self._compute(size, split_at)

        return PiecewiseStep(size, capture.capture_pieces(run), split_ops)

    def _compute(self, size: int, split_at: Callable[[int, SplitOp], None]) -> None:
        """Compute the step in static memory, as one of `size` rows, without the operations that split it."""
        ids, positions, *slots = self._numbers[:, :size]
        groups: list[Any] = []
        for group_idx, is_state in enumerate(self._is_state):
            split = partial(split_at, group_idx)
            if is_state:
                groups.append(PiecewiseStateBatch((), (), (), seams=self._seams, split=split))
            else:
                nothing = ids[:0]
                groups.append(
                    PiecewiseAttentionBatch(slots.pop(0), (0,), (), nothing, (0,), seams=self._seams, split=split)
                )
        self._hidden[:size].copy_(self._decoder(ids, positions, groups, self._storages))

    def takes(self, num_rows: int) -> bool:
        """Return whether a step of `num_rows` rows fits into a captured one."""
        return 0 < num_rows <= self._sizes[-1]

    def run(self, batch: Batch) -> Tensor:
        """Compute a step that `takes` accepted; return the hidden states of all rows before the last norm, [T, E]."""
        num_rows, ops = len(batch.input_ids), self._decoder.ops
        size, pieces, split_ops = self._steps[bisect_left(self._sizes, num_rows)]
        slots = [group.slot_mapping for group in batch.groups if not isinstance(group, StateBatch)]
        if num_rows < size:
            self._numbers[:, num_rows:size].zero_()
        torch.stack((batch.input_ids, batch.positions, *slots), out=self._numbers[:, :num_rows])
        steps: list[Any] = [
            ops.step_states(group, storage) if isinstance(group, StateBatch) else ops.step_attention(group, storage)  # type: ignore[arg-type]
            for group, storage in zip(batch.groups, self._storages, strict=True)
        ]
        for piece, (group_idx, split_op) in zip(pieces, split_ops, strict=False):
            piece.replay()
            split_op(steps[group_idx], num_rows)
        pieces[-1].replay()
        # A copy: the next step overwrites the static memory, while rows of prompts may still be read.
        return self._hidden[:num_rows].clone()
