"""Verification of drafts: an item's result is a run of sampled tokens up to the first that differs from its draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from quire.execution.sampling.logits_processing import KeepTokens
from quire.execution.sampling.row_sampling import Row, SampledRow, SamplingState, sample_rows
from quire.scheduling.plan import ItemResult, ScheduledSequence


def run_of(item: ScheduledSequence, drawn: Sequence[int]) -> tuple[int, ...]:
    """Return the sampled tokens up to and including the first that differs from its draft."""
    certain = len(item.token_ids) - item.num_draft
    for draft_idx, (token_id, draft) in enumerate(zip(drawn, item.token_ids[certain:], strict=False), 1):
        if token_id != draft:
            return tuple(drawn[:draft_idx])
    return tuple(drawn)


def verify(
    logits: torch.Tensor, items: Sequence[ScheduledSequence], states: Sequence[SamplingState], keep: KeepTokens
) -> list[ItemResult]:
    """Sample a run for each item.

    Each row samples the token that it would without drafts, from the same distribution with the same random number; as
    long as the drafts equal these tokens, the following rows are valid too. For a deterministic draft (probability 1),
    this is rejection sampling: it is accepted with its target probability, and a token that replaces it has the target
    distribution of the other tokens.

    Rows that depend on the tokens before them are sampled in waves, one row of each item; the others all at once.

    Source: speculative sampling, arXiv 2211.17192.
    """
    starts = list(accumulate((1 + item.num_draft for item in items), initial=0))
    runs: list[list[SampledRow]] = [[] for _ in items]
    wave = [
        (idx, draft_idx)
        for idx, (item, state) in enumerate(zip(items, states, strict=True))
        for draft_idx in range(1 if state.looks_back else 1 + item.num_draft)
    ]
    while wave:
        rows = []
        for idx, draft_idx in wave:
            item, state = items[idx], states[idx]
            rows.append(Row(state, item.start + len(item.token_ids) - item.num_draft + draft_idx, item.num_samples))
        part = logits if len(wave) == len(logits) else logits[[starts[idx] + draft_idx for idx, draft_idx in wave]]
        for (idx, _), drawn in zip(wave, sample_rows(part, rows, keep), strict=True):
            runs[idx].append(drawn)
        wave = [
            (idx, draft_idx)
            for idx, draft_idx in ((idx, draft_idx + 1) for idx, draft_idx in wave if states[idx].looks_back)
            if draft_idx <= items[idx].num_draft and _learn_draft(items[idx], states[idx], draft_idx, runs[idx][-1])
        ]
    return [run_result(item, [drawn.result_of(item) for drawn in run]) for item, run in zip(items, runs, strict=True)]


def _learn_draft(item: ScheduledSequence, state: SamplingState, draft_idx: int, drawn: SampledRow) -> bool:
    """Return whether the item's `draft_idx`-th draft, from 1 on, was sampled; if so, add it to the token history."""
    offset = len(item.token_ids) - item.num_draft + draft_idx - 1
    draft = item.token_ids[offset : offset + 1]
    if drawn.token_ids != tuple(draft):
        return False
    if state.adjustments is not None and state.adjustments.history is not None:
        state.adjustments.history.sync(item.start + offset, draft, is_end=True)
    return True


def run_result(item: ScheduledSequence, rows: Sequence[ItemResult]) -> ItemResult:
    """Return the result of an item, up to the first error."""
    if rows[0].error is not None or not item.num_draft:
        return rows[0]
    # An error of a later row recurs in the next step and is reported then; tokens accepted before it are kept.
    sound = next((row_idx for row_idx, drawn in enumerate(rows) if drawn.error is not None), len(rows))
    run = run_of(item, [drawn.token_ids[0] for drawn in rows[:sound]])
    logprobs = tuple(drawn.logprobs[0] for drawn in rows[: len(run)] if drawn.logprobs)
    return ItemResult(item.seq_id, run, logprobs)
