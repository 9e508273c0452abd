"""Pooling: the results of requests that are read from the model at tokens of their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isfinite

from torch import Tensor

from quire.models.modules.decoder import Decoder
from quire.scheduling.plan import ItemResult, ScheduledSequence
from quire.sequences.pooling import Pooling

BAD_HIDDEN = "the model gave a result that is not of finite numbers"


class Pooler:
    """Computes the results of pooled sequences: `by_sequence` has the open ones, and `sums` the states of some."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.by_sequence: dict[int, Pooling] = {}
        # Sums of the states of the tokens computed so far, [E] of float64, and their number.
        self.sums: dict[int, tuple[Tensor, int]] = {}

    def reads_all(self, items: Sequence[ScheduledSequence]) -> bool:
        """Return whether the hidden states of all rows are needed, for an item that takes the mean over its prompt."""
        known = self.by_sequence
        return any(item.seq_id in known and known[item.seq_id].kind == "mean" for item in items)

    def add_rows(self, items: Sequence[ScheduledSequence], row_starts: Sequence[int], hidden: Tensor) -> None:
        """Add the states of a step's rows to the sums of the items that take a mean.

        Args:
            items: items of the step.
            row_starts: S + 1 numbers; item `s` owns rows `[row_starts[s], row_starts[s + 1])`.
            hidden: hidden states before the last norm; [T, E] if an item takes a mean, else of any rows.
        """
        for item, (start, end) in zip(items, pairwise(row_starts), strict=True):
            pooling = self.by_sequence.get(item.seq_id)
            if pooling is not None and pooling.kind == "mean":
                # In float64, so that the chunks of a prompt hardly change the sum.
                rows = self._decoder.normed(hidden[start:end]).double().sum(0)
                total, count = self.sums.get(item.seq_id, (None, 0))
                self.sums[item.seq_id] = (rows if total is None else total + rows), count + end - start

    def take(
        self, items: Sequence[ScheduledSequence], hidden: Tensor
    ) -> tuple[list[ScheduledSequence], Tensor, dict[int, ItemResult]]:
        """Compute the results of pooled items; return the other items, their hidden states, and the results by id."""
        known, others = self.by_sequence, [item for item in items if item.seq_id not in self.by_sequence]
        if len(others) == len(items):
            return others, hidden, {}
        ends = list(accumulate(item.num_draft + 1 for item in items))
        rows = [end - 1 for item, end in zip(items, ends, strict=True) if item.seq_id in known]
        pooled = [item for item in items if item.seq_id in known]
        results = self._compute([item.seq_id for item in pooled], hidden[rows])
        is_other = [item.seq_id not in known for item in items for _ in range(item.num_draft + 1)]
        return others, hidden[[row for row, kept in enumerate(is_other) if kept]], results

    def _compute(self, seq_ids: Sequence[int], hidden: Tensor) -> dict[int, ItemResult]:
        """Return the results of sequences from the hidden states of their last tokens, [R, E], or from their sums."""
        results: dict[int, ItemResult] = {}
        scored = [idx for idx, seq_id in enumerate(seq_ids) if self.by_sequence[seq_id].token_ids]
        logits = dict(zip(scored, self._decoder.logits(hidden[scored]), strict=True)) if scored else {}
        for idx, (seq_id, state) in enumerate(zip(seq_ids, self._decoder.normed(hidden).float(), strict=True)):
            token_ids = self.by_sequence[seq_id].token_ids
            if seq_id in self.sums:
                total, count = self.sums.pop(seq_id)
                state = (total / count).float()
            results[seq_id] = pooled_result(seq_id, (logits[idx][list(token_ids)] if token_ids else state).tolist())
        return results


def pooled_result(seq_id: int, values: Sequence[float]) -> ItemResult:
    """Return the result of a pooled sequence; an error if a value is not finite."""
    if all(map(isfinite, values)):
        return ItemResult(seq_id, (), pooled=tuple(values))
    return ItemResult(seq_id, (), error=BAD_HIDDEN)
