"""Captured passes of an MTP head, in which it makes drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.execution.batch import BatchBuilder
from quire.execution.graph_ladder import GraphLadder
from quire.execution.kv_storage import Storage
from quire.execution.step_capture import StepCapture
from quire.models.mtp import MTPHead
from quire.ops.interface import AttentionBatch, StateBatch
from quire.ops.lora import LoraRows
from quire.ops.static_steps import StaticLimits
from quire.scheduling.plan import ScheduledSequence


class MTPLadder(GraphLadder):
    """The captured passes of an MTP head over its KV memory.

    ```
     static memory   token ids, positions, block tables ->            -> token ids of drafts
                     hidden states, one for each row    -> captured   -> hidden states of the head, in their place
    ```

    A pass leaves its hidden states where the next one reads its own: nothing is copied between them while the same
    sequences want drafts. Rows of padding read what is left there; no other row reads theirs.

    Args:
        head: the head, whose backend makes static steps.
        storages: memory of its cache groups but the last one, which has hidden states of the target.
        sizes, limits, block_size, capture, first_group: see `GraphLadder`.

    Raises:
        RuntimeError: a pass cannot be captured.
    """

    def __init__(
        self,
        head: MTPHead,
        storages: Sequence[Storage],
        sizes: Sequence[int],
        limits: StaticLimits,
        block_size: int,
        capture: StepCapture,
        first_group: int = 0,
    ) -> None:
        self._head = head
        self._drafted = torch.zeros(limits.num_rows, dtype=torch.int64, device=head.device)
        super().__init__(head, storages, sizes, limits, block_size, capture, first_group)

    def _num_logits(self) -> int:
        """See `GraphLadder`: a pass has the likeliest tokens in place of logits."""
        return 0

    def _run_model(
        self,
        ids: Tensor,
        positions: Tensor,
        batches: Sequence[AttentionBatch | StateBatch],
        adapters: tuple[LoraRows, None] | None,  # noqa: ARG002
    ) -> None:
        """See `GraphLadder`."""
        size = len(ids)
        hidden = self._head.run(ids, positions, batches, self._storages, self._hidden[:size])
        self._hidden[:size].copy_(hidden)
        self._drafted[:size].copy_(self._head.predict(hidden))

    def run_pass(
        self, items: Sequence[ScheduledSequence], builder: BatchBuilder, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute a pass.

        Args:
            items: n items of one token each, which it takes; see `takes`.
            builder: has their block tables, with a slot for the token of each.
            hidden: [n, E], for each item the normed hidden state of the token before it; may be what the last pass
                returned.

        Returns:
            Normed hidden states of the head [n, E] and the likeliest tokens behind them [n], in static memory: until
            the next pass.
        """
        count = len(items)
        if hidden.data_ptr() != self._hidden.data_ptr():
            self._hidden[:count].copy_(hidden)
        return self.run(items, builder).hidden, self._drafted[:count]
