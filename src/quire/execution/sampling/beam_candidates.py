"""The best continuations of the beams of a search, for all searches of a step at once.

```
 logits [R, V] -> log probabilities, after logits processing -> the best of each row
               -> plus the beams' scores, the beams of a group side by side -> the best of each group
```
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch

from quire.execution.sampling.logits_processing import KeepTokens, LogitsProcessing, adjust
from quire.execution.sampling.logprobs import measure, rows_per_tile
from quire.execution.sampling.rows import stable_topk
from quire.scheduling.plan import BeamGroup, Candidate


class BeamRow(NamedTuple):
    """The row of one beam.

    Args:
        adjustments: logits processing of its request; None for none.
        position: position of the token that the row's logits are for.
        num_logprobs: number of most probable tokens to list; None without log probabilities.
    """

    adjustments: LogitsProcessing | None
    position: int
    num_logprobs: int | None


def find_candidates(
    logits: torch.Tensor, rows: Sequence[BeamRow], groups: Sequence[BeamGroup], keep: KeepTokens
) -> tuple[list[tuple[Candidate, ...]], dict[int, str]]:
    """Return the best continuations of each group; ties go to the earlier beam, then to the lower token id."""
    width = min(max(group.num_candidates for group in groups), logits.shape[1])
    values, ids, errors = _best_of_rows(logits, rows, width, keep)
    values += torch.tensor([score for group in groups for score in group.scores], device=logits.device)[:, None]
    found: list[tuple[Candidate, ...]] = [()] * len(groups)
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    firsts, first = [], 0
    for idx, group in enumerate(groups):
        alike[len(group.seq_ids), group.num_candidates].append(idx)
        firsts.append(first)
        first += len(group.seq_ids)
    for (num_beams, num_candidates), members in alike.items():
        places = torch.tensor([[firsts[idx] + beam for beam in range(num_beams)] for idx in members])
        places = places.to(logits.device)
        # Sorted by row, and in a row by value: a stable sort leaves equals in that order.
        scores, order = values[places].flatten(1).sort(dim=-1, descending=True, stable=True)
        scores, order = scores[:, :num_candidates], order[:, :num_candidates]
        tokens = ids[places].flatten(1).gather(1, order)
        parents = order // width
        columns = zip(members, parents.tolist(), tokens.tolist(), scores.tolist(), strict=True)
        for idx, *candidates in columns:
            found[idx] = tuple(Candidate(*one) for one in zip(*candidates, strict=True) if one[2] > -inf)
    for idx, group in enumerate(groups):
        count = rows[firsts[idx]].num_logprobs
        if count is not None:
            found[idx] = _measured(logits[firsts[idx] : firsts[idx] + len(group.seq_ids)], found[idx], count)
    return found, errors


def _best_of_rows(
    logits: torch.Tensor, rows: Sequence[BeamRow], width: int, keep: KeepTokens
) -> tuple[torch.Tensor, torch.Tensor, dict[int, str]]:
    """Return the `width` best log probabilities of each row and their tokens, [R, width], after logits processing.

    It is applied to log probabilities, which are not normalised again: so the scores are the same as in transformers.
    """
    values, ids, errors = [], [], dict[int, str]()
    tile = rows_per_tile(logits.shape[1])
    for start in range(0, len(rows), tile):
        # Row by row: other rows do not change the sum of a row.
        part = logits[start : start + tile].log_softmax(-1)
        changed = [
            (row, known.adjustments, known.position)
            for row, known in enumerate(rows[start : start + tile])
            if known.adjustments is not None and not known.adjustments.is_none(known.position)
        ]
        if changed:
            errors |= {start + row: error for row, error in adjust(part, changed, keep).items()}
        best, best_ids = stable_topk(part, width)
        values.append(best)
        ids.append(best_ids)
    return torch.cat(values), torch.cat(ids), errors


def _measured(logits: torch.Tensor, candidates: Sequence[Candidate], count: int) -> tuple[Candidate, ...]:
    """Return the candidates of a group with the log probabilities of their tokens, from its rows [W, V]."""
    measured: list[Candidate] = []
    tile = rows_per_tile(logits.shape[1])
    for start in range(0, len(candidates), tile):
        part = candidates[start : start + tile]
        parents, tokens = [one.parent_idx for one in part], [one.token_id for one in part]
        all_logprobs = measure(logits[parents], tokens, [count] * len(part))
        measured += [one._replace(logprobs=own) for one, own in zip(part, all_logprobs, strict=True)]
    return tuple(measured)
