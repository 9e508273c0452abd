"""A draft model: a second, smaller model that proposes the next tokens of sequences, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from quire.execution.capture.decode_rows import few_rows_of
from quire.execution.capture.graph_ladder import GraphLadder
from quire.execution.device_tokens.device_tokens import (
    DeviceDrafts,
    DeviceTokens,
    DraftTokens,
    num_wanted,
)
from quire.execution.step.batch import BatchBuilder, end_rows
from quire.execution.step.kv_storage import Storage
from quire.execution.step.pinned import select_rows
from quire.models.modules.causal_model import CausalModel
from quire.scheduling.plan import ItemResult, ScheduledSequence
from quire.sequences.decoding.drafting import UNKNOWN


class DraftModel:
    """Runs a draft model in its own cache groups, which come after the target's and get slots with them.

    In each step it computes all tokens that the target does, prompts, decodes and drafts, so that a block that is
    shared, published, swapped or rolled back has the keys and values of both. Therefore even the last draft is computed
    here: if it is accepted, its block may be shared before the next step.

    ```
     pass 0   tokens of the step that are certain, of all sequences    -> draft 1
     pass 1   draft 1, of the sequences that want drafts               -> draft 2
     ...      draft k                                                  -> nothing
    ```

    Ranks that share the target make the same drafts: all of them run this. The host launches all passes, and then the
    target, before it knows a draft.

    Source: speculative sampling, arXiv 2211.17192 and 2302.01318.
    """

    def __init__(
        self,
        decoder: CausalModel,
        builder: BatchBuilder,
        tokens: DraftTokens,
        storages: Sequence[Storage],
        groups: range,
        ladder: GraphLadder | None = None,
    ) -> None:
        self._decoder = decoder
        self._builder, self._tokens = builder, tokens
        self._storages = tuple(storages)
        self._groups = groups
        self._ladder = ladder

    def guess(self, items: Sequence[ScheduledSequence]) -> DeviceDrafts | None:
        """Compute a step's tokens, and return drafts for the placeholders among them; None if there are none."""
        wanted = num_wanted(items)
        certain = [
            item._replace(token_ids=item.token_ids[: len(item.token_ids) - count]) if count else item
            for item, count in zip(items, wanted, strict=True)
        ]
        self._tokens.known = None
        token_ids = self._run(certain, [count > 0 for count in wanted])
        live = [idx for idx, count in enumerate(wanted) if count]
        passes: list[tuple[Sequence[int], Tensor]] = []
        while live:
            passes.append((live, token_ids))
            depth = len(passes)
            step = [
                certain[idx]._replace(
                    start=certain[idx].start + len(certain[idx].token_ids) + depth - 1, token_ids=(UNKNOWN,)
                )
                for idx in live
            ]
            goes_on = [depth < wanted[idx] for idx in live]
            self._tokens.known = DeviceTokens(token_ids)
            token_ids = self._run(step, goes_on)
            live = list(compress(live, goes_on))
        return self._tokens.take_drafts(items, passes)

    def _run(self, items: Sequence[ScheduledSequence], is_read: Sequence[bool]) -> Tensor:
        """Store keys and values of tokens; return the likeliest token after each item that is read, int64 [n]."""
        ladder, found = self._ladder, None if self._ladder is None else few_rows_of(items)
        if ladder is not None and found is not None and ladder.takes(found[0]):
            rows, counts = found
            step = ladder.run(rows, self._builder, None, counts)
            # A copy: the next pass overwrites the static memory.
            return select_rows(step.outputs, end_rows(items, is_read))
        batch = self._builder.lay_out(items, self._groups)
        read = self._builder.lay_out_ends(items, is_read, self._groups)
        hidden = self._decoder(batch.input_ids, batch.positions, batch.groups, self._storages, output_rows=read)
        return self._decoder.draft_tokens(hidden) if any(is_read) else torch.empty(0, dtype=torch.int64)


def with_drafts(
    results: Sequence[ItemResult], planned: Sequence[ScheduledSequence], run: Sequence[ScheduledSequence]
) -> list[ItemResult]:
    """Return the results with the drafts that a model made."""
    return [
        result if item is before else result._replace(draft=tuple(item.token_ids[-item.num_draft :]))
        for result, before, item in zip(results, planned, run, strict=True)
    ]
