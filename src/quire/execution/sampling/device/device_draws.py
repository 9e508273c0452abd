"""Sampling without synchronisation: the same tokens as `quire.execution.sampling.sampling`, by torch operators whose
shapes do not depend on values, so that they can be queued on a GPU. It is the reference implementation for backends
with sampling kernels.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from quire.execution.sampling.sampling import invert_cdf
from quire.ops.interface.token_draws import BROKEN, FINE, NARROW, NOTHING_LEFT, RowFilters, RowParameters

_FIRST, _SECOND, _STEP = (
    number - (1 << 64) if number >> 63 else number
    for number in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15)
)


def uniform_numbers(seeds: Tensor, sample_idxs: Tensor, positions: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), float64 [R]: the same as `sampling.uniform`, bit for bit."""
    value = _mixed(seeds)
    value = _mixed(value ^ sample_idxs)
    value = _mixed(value ^ positions)
    return _shifted(value, 11).double() * 2.0**-53


def _mixed(value: Tensor) -> Tensor:
    value = value + _STEP
    value = (value ^ _shifted(value, 30)) * _FIRST
    value = (value ^ _shifted(value, 27)) * _SECOND
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, count: int) -> Tensor:
    """Shift right logically, without the sign."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def topk_in_order(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the same as `rows.stable_topk`: the lower token id comes first among finite equals.

    A tie that crosses the cut is resolved by a cumulative count of equal logits along the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    if count == vocab_size:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    values, ids = logits.topk(count)
    edge = values[:, -1:]
    places = torch.arange(count, device=logits.device).expand(num_rows, -1)
    num_above = (values > edge).sum(-1, keepdim=True)
    equals = (logits == edge).cumsum(-1, dtype=torch.int32)
    at_edge = torch.searchsorted(equals, (places + 1).int().contiguous()).clamp_(max=vocab_size - 1)
    at_edge = at_edge.gather(1, (places - num_above).clamp_(min=0))
    ids = torch.where(places < num_above, ids, at_edge)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def cool(logits: Tensor, temperature: Tensor) -> Tensor:
    """Subtract the greatest logit of each row [R, V] and divide by its temperature [R], in place."""
    return logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def draw_whole(logits: Tensor, points: Tensor) -> Tensor:
    """Sample from all tokens."""
    return invert_cdf(logits.exp_(), points[:, None])[:, 0]


def draw_filtered(logits: Tensor, filters: RowFilters, points: Tensor, width: int) -> Tensor:
    """Sample from the tokens that top_k, top_p and min_p keep, likeliest first."""
    values, ids = topk_in_order(logits, width)
    weights = values.exp_()
    ranks = torch.arange(width, device=logits.device)
    is_dropped = (weights < filters.min_p[:, None]) | (ranks >= filters.top_k[:, None])
    weights = weights.masked_fill(is_dropped, 0.0)
    reached = weights.cumsum(-1, dtype=torch.float64)
    # A token is kept if the mass of the tokens before it is less than top_p; so the likeliest always is.
    last = torch.searchsorted(reached, filters.top_p[:, None] * reached[:, -1:])
    weights = weights.masked_fill(ranks > last, 0.0)
    return ids.gather(1, invert_cdf(weights, points[:, None]))[:, 0]


class TorchDraws:
    """Implements `quire.ops.interface.token_draws.DrawsTokens` by torch operators."""

    def check_logits(self, logits: Tensor) -> Tensor:
        """Return the status of each row: whether it can be sampled from."""
        return _mark(logits, None)

    def draw_tokens(
        self, logits: Tensor, parameters: RowParameters | None, positions: Tensor | None, before: Tensor | None
    ) -> Tensor:
        """Sample a token for each row."""
        if parameters is None:
            greatest, chosen = logits.max(-1)
            return torch.stack((chosen, torch.where(greatest.isfinite(), FINE, BROKEN)))
        status = _mark(logits, before)
        return torch.stack((_choose(logits, parameters, positions), status))


def _mark(logits: Tensor, status: Tensor | None) -> Tensor:
    """Return the states of rows, int64 [R], and zero the logits of rows that cannot be sampled from."""
    greatest = logits.amax(-1)
    is_wrong = ~greatest.isfinite()
    logits.masked_fill_(is_wrong[:, None], 0.0)
    if status is None:
        return torch.where(is_wrong, BROKEN, FINE)
    now = torch.where(greatest == -inf, NOTHING_LEFT, torch.where(is_wrong, BROKEN, FINE))
    return torch.where(status == FINE, now, status)


def _choose(logits: Tensor, parameters: RowParameters, positions: Tensor | None) -> Tensor:
    """Return the sampled token of each row, int64 [R]."""
    if not parameters.draws:
        return logits.argmax(-1)
    assert positions is not None, "a draw has a position"
    filters, vocab_size = parameters.filters, logits.shape[1]
    numbers = uniform_numbers(parameters.seeds, parameters.sample_idxs, positions)
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if parameters.greedy is not None:
        chosen[parameters.greedy] = logits[parameters.greedy].argmax(-1)
    drawing = (parameters.whole, parameters.few, parameters.many)
    for rows, width in zip(drawing, (None, min(NARROW, vocab_size), vocab_size), strict=True):
        if rows is None:
            continue
        cooled = cool(logits[rows], filters.temperature[rows])
        if width is None:
            chosen[rows] = draw_whole(cooled, numbers[rows])
        else:
            chosen[rows] = draw_filtered(cooled, filters.of(rows), numbers[rows], width)
    return chosen
