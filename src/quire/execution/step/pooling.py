"""Pooling: the results of requests that are read from the model at tokens of their prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from quire.models.modules.causal_model import CausalModel
from quire.models.modules.pooled_heads import PooledHeads
from quire.scheduling.plan import ItemResult, ScheduledSequence
from quire.sequences.pooling import Pooling, PoolingKind

# Functions that join the values of two chunks, by kind; those of other kinds are added.
_JOINED: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "max": torch.maximum,
    "tokens": lambda first, second: torch.cat((first, second)),
}
BAD_HIDDEN = "the model gave a result that is not of finite numbers"


class RunningPool:
    """Pools the hidden states of a prompt whose rows come in chunks.

    Sums are of float64, so that the chunks of a prompt hardly change them.

    Args:
        kind: rows that are pooled.
        first: number of leading rows that are left out; see `Pooling`.

    Source: the formulas of sentence-transformers 6.2 (`sentence_transformer/modules/pooling.py`).
    """

    def __init__(self, kind: PoolingKind, first: int = 0) -> None:
        self._kind, self._first = kind, first
        self._num_seen, self._weight = 0, 0
        self._value: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add the next rows [T, E] of the prompt."""
        start = max(self._first - self._num_seen, 0)
        position = self._num_seen + start
        self._num_seen += len(rows)
        rows = rows[start:]
        if not len(rows) or (self._kind == "cls" and self._value is not None):
            return
        value, weight = self._pooled(rows, position)
        if self._value is not None and self._kind != "last":
            value = _JOINED.get(self._kind, torch.add)(self._value, value)
        self._value, self._weight = value, self._weight + weight

    def _pooled(self, rows: Tensor, position: int) -> tuple[Tensor, int]:
        """Return a value [E], or all rows, of rows that begin at a position, and its weight."""
        match self._kind:
            case "max":
                return rows.amax(0), 0
            case "tokens":
                return rows, 0
            case "mean" | "mean_sqrt_len_tokens":
                return rows.double().sum(0), len(rows)
            case "weightedmean":
                end = position + len(rows)
                weights = torch.arange(position + 1, end + 1, device=rows.device, dtype=torch.float64)
                return weights @ rows.double(), (position + 1 + end) * len(rows) // 2
            case _:
                return rows[0 if self._kind == "cls" else -1], 0

    def result(self) -> Tensor:
        """Return the pooled state, [E] of float32, of a prompt with more than `first` rows; all rows for "tokens"."""
        assert self._value is not None, "a row is pooled"
        value, weight = self._value, self._weight
        if self._kind == "mean_sqrt_len_tokens":
            value = value / math.sqrt(weight)
        elif weight:
            value = value / weight
        return value.float()


class Pooler:
    """Computes the results of pooled sequences: `by_sequence` has the open ones, and `pools` the states of some."""

    def __init__(self, decoder: CausalModel) -> None:
        self._decoder = decoder
        self.by_sequence: dict[int, Pooling] = {}
        # The pooled states of the tokens computed so far.
        self.pools: dict[int, RunningPool] = {}

    def reads_all(self, items: Sequence[ScheduledSequence]) -> bool:
        """Return whether the hidden states of all rows are needed, for an item that pools all rows of its prompt."""
        known = self.by_sequence
        return any(item.seq_id in known and known[item.seq_id].reads_all for item in items)

    def add_rows(self, items: Sequence[ScheduledSequence], row_starts: Sequence[int], hidden: Tensor) -> None:
        """Add the states of a step's rows to the pools of the items that pool all rows.

        Args:
            items: items of the step.
            row_starts: S + 1 numbers; item `s` owns rows `[row_starts[s], row_starts[s + 1])`.
            hidden: hidden states before the last norm; [T, E] if an item pools all rows, else of any rows.
        """
        for item, (start, end) in zip(items, pairwise(row_starts), strict=True):
            pooling = self.by_sequence.get(item.seq_id)
            if pooling is not None and pooling.reads_all:
                pool = self.pools.setdefault(item.seq_id, RunningPool(pooling.kind, pooling.first))
                pool.add(self._decoder.normed(hidden[start:end]))

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
        """Return the results of sequences from the hidden states of their last tokens, [R, E], or from their pools."""
        poolings = [self.by_sequence[seq_id] for seq_id in seq_ids]
        values: dict[int, list[float]] = {}
        scored = [idx for idx, pooling in enumerate(poolings) if pooling.token_ids]
        if scored:
            for idx, logits in zip(scored, self._decoder.logits(hidden[scored]), strict=True):
                values[idx] = logits[list(poolings[idx].token_ids)].tolist()
        others = [idx for idx, pooling in enumerate(poolings) if not pooling.token_ids]
        if others:
            last = self._decoder.normed(hidden[others]).float()
            pools = [self.pools.pop(seq_ids[idx], None) for idx in others]
            states = [state if pool is None else pool.result() for state, pool in zip(last, pools, strict=True)]
            found = pooled_values(states, [poolings[idx] for idx in others], self._decoder.heads)
            values |= zip(others, found, strict=True)
        return {seq_id: pooled_result(seq_id, values[idx]) for idx, seq_id in enumerate(seq_ids)}


def pooled_values(states: Sequence[Tensor], poolings: Sequence[Pooling], heads: PooledHeads) -> list[list[float]]:
    """Return embeddings, or the logits of classes.

    Args:
        states: pooled hidden state of each result, [E] of float32; [T, E] for logits of each token.
        poolings: kind of each result.
        heads: layers over the states.
    """
    kinds = [each.kind if each.kind in ("classify", "tokens") else "embed" for each in poolings]
    values: dict[int, list[float]] = {}
    for kind, compute in (("classify", heads.logits), ("embed", heads.embeddings)):
        idxs = [idx for idx, each in enumerate(kinds) if each == kind]
        if idxs:
            values |= zip(idxs, compute(torch.stack([states[idx] for idx in idxs])).tolist(), strict=True)
    for idx in (idx for idx, each in enumerate(kinds) if each == "tokens"):
        values[idx] = heads.logits(states[idx]).flatten().tolist()
    return [values[idx] for idx in range(len(poolings))]


def pooled_result(seq_id: int, values: Sequence[float]) -> ItemResult:
    """Return the result of a pooled sequence; an error if a value is not finite."""
    if all(map(math.isfinite, values)):
        return ItemResult(seq_id, (), pooled=tuple(values))
    return ItemResult(seq_id, (), error=BAD_HIDDEN)
