"""Captured draft passes of a draft model or an MTP head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.execution.capture.graph_ladder import GraphLadder
from quire.execution.step.batch import BatchBuilder
from quire.models.modules.mtp import MTPHead
from quire.ops.interface.lora import LoraRows
from quire.ops.interface.ops import AttentionBatch, StateBatch
from quire.scheduling.plan import ScheduledSequence


class DraftLadder(GraphLadder):
    """The captured passes of a draft model over its KV memory; see `GraphLadder` for its arguments.

    A pass returns the likeliest next token of each row, in place of logits.
    """

    def _make_outputs(self, num_rows: int) -> Tensor:
        """See `GraphLadder`: the likeliest tokens, int64 [n]."""
        return torch.zeros(num_rows, dtype=torch.int64, device=self._decoder.device)

    def _run_model(
        self,
        ids: Tensor,
        positions: Tensor,
        batches: Sequence[AttentionBatch | StateBatch],
        adapters: tuple[LoraRows, None] | None,
    ) -> None:
        """See `GraphLadder`."""
        hidden = self._decoder(ids, positions, batches, self._storages, adapters=adapters)
        self._outputs[: len(ids)].copy_(self._decoder.draft_tokens(hidden))


class MTPLadder(DraftLadder):
    """The captured passes of an MTP head over its KV memory.

    ```
     static memory   token ids, positions, block tables ->            -> the likeliest tokens
                     hidden states, one for each row    -> captured   -> hidden states of the head, in their place
    ```

    A pass writes its hidden states to the buffer that the next pass reads: nothing is copied between passes as long as
    the same sequences want drafts. Padding rows read stale values there, which affect no other row.

    The last of its cache groups has hidden states of the target, which no captured pass reads.
    """

    _decoder: MTPHead

    def _run_model(
        self,
        ids: Tensor,
        positions: Tensor,
        batches: Sequence[AttentionBatch | StateBatch],
        adapters: tuple[LoraRows, None] | None,  # noqa: ARG002
    ) -> None:
        """See `GraphLadder`."""
        size = len(ids)
        hidden = self._decoder.run(ids, positions, batches, self._storages, self._hidden[:size])
        self._hidden[:size].copy_(hidden)
        self._outputs[:size].copy_(self._decoder.predict(hidden))

    def run_pass(
        self, items: Sequence[ScheduledSequence], builder: BatchBuilder, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute a pass.

        Args:
            items: n items of one token each that `takes` accepted.
            builder: has their block tables, with a slot for the token of each.
            hidden: [n, E], for each item the normed hidden state of the token before it; may be the result of the last
                pass.

        Returns:
            Normed hidden states of the head [n, E], in static memory that the next pass overwrites; and the likeliest
            next tokens [n].
        """
        count = len(items)
        if hidden.data_ptr() != self._hidden.data_ptr():
            self._hidden[:count].copy_(hidden)
        step = self.run(items, builder)
        return step.hidden, step.outputs.clone()
