"""Sampling of a step with beams, and of a step item by item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from quire.errors import describe
from quire.execution.sampling.beam_candidates import BeamRow, find_candidates
from quire.execution.sampling.row_sampling import BAD_LOGITS, SampledRow, refuse
from quire.execution.sampling.sampler import Sampler
from quire.execution.step.device_health import require_device
from quire.scheduling.plan import BeamGroup, Candidate, ItemResult, ScheduledSequence


def sample_beams(
    sampler: Sampler, logits: torch.Tensor, items: Sequence[ScheduledSequence], groups: Sequence[BeamGroup]
) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
    """Draw the tokens of a step, and find the candidates of its beam groups."""
    if not groups:
        return sampler.sample(logits, items), ()
    item_idx_of = {item.seq_id: item_idx for item_idx, item in enumerate(items)}
    beam_idxs = [item_idx_of[seq_id] for group in groups for seq_id in group.seq_ids]
    searching = set(beam_idxs)
    # A beam has one row; another item one more for each draft.
    starts = list(accumulate((1 + item.num_draft for item in items), initial=0))
    others = [item_idx for item_idx in range(len(items)) if item_idx not in searching]
    other_rows = [row for item_idx in others for row in range(starts[item_idx], starts[item_idx + 1])]
    drawn = iter(sampler.sample(logits[other_rows], [items[item_idx] for item_idx in others]) if others else ())
    rows = [starts[item_idx] for item_idx in beam_idxs]
    own = logits if rows == list(range(len(logits))) else logits[rows]
    errors = refuse(own, own.amax(-1, keepdim=True), BAD_LOGITS)
    states = [sampler.states[items[item_idx].seq_id] for item_idx in beam_idxs]
    ends = [items[item_idx].start + len(items[item_idx].token_ids) for item_idx in beam_idxs]
    known = [BeamRow(one.adjustments, end, one.params.logprobs) for one, end in zip(states, ends, strict=True)]
    found, failed = find_candidates(own, known, groups, sampler.keep)
    failures = {items[beam_idxs[row]].seq_id: error for row, error in (failed | errors).items()}
    results = [
        SampledRow(error=failures.get(item.seq_id)).result_of(item) if item_idx in searching else next(drawn)
        for item_idx, item in enumerate(items)
    ]
    whole = [not any(seq_id in failures for seq_id in group.seq_ids) for group in groups]
    return results, tuple(own if is_whole else () for own, is_whole in zip(found, whole, strict=True))


def sample_apart(
    sampler: Sampler,
    logits_of: Callable[[list[int]], torch.Tensor],
    items: Sequence[ScheduledSequence],
    groups: Sequence[BeamGroup],
) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
    """Sample the items of a step one by one, the beams of a search together, after sampling all at once has failed.

    So an item that fails does not affect the others, unless the GPU has failed.
    """
    require_device()
    sampler.begin(items)
    ends = accumulate(1 + item.num_draft for item in items)
    rows_of = {item.seq_id: range(end - 1 - item.num_draft, end) for item, end in zip(items, ends, strict=True)}
    known = {item.seq_id: item for item in items}
    parts = [([known.pop(seq_id) for seq_id in group.seq_ids], [group]) for group in groups]
    parts += [([item], []) for item in known.values()]
    results: dict[int, ItemResult] = {}
    found: list[tuple[Candidate, ...]] = []
    for own, own_groups in parts:
        try:
            logits = logits_of([row for item in own for row in rows_of[item.seq_id]])
            drawn, candidates = sample_beams(sampler, logits, own, own_groups)
        except Exception as error:
            reason = f"its tokens could not be sampled ({describe(error)})"
            drawn = [ItemResult(item.seq_id, (), error=reason) for item in own]
            candidates = ((),) * len(own_groups)
        results |= {result.seq_id: result for result in drawn}
        found += candidates
    return [results[item.seq_id] for item in items], tuple(found)
