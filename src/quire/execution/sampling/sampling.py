"""Random sampling of tokens: filters, and draws by a counter-based random number generator.

A draw is a function of the row's own logits, of the sequence's seed and sample index, and of the token's position.
The generator has no state, which could depend on the batch, its order, or a preemption in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.execution.sampling.filters import apply_top_n_sigma, apply_typical_p
from quire.execution.sampling.rows import CHUNK, chunk_sums, row_sums, stable_topk
from quire.sequences.params import SamplingParams

# Numbers of the best tokens among which a row's nucleus is looked for, before the whole vocabulary is sorted.
WIDTHS = (256, 4096)
_MASK = (1 << 64) - 1


class Filter(NamedTuple):
    """The sampling filters of a row; names as in `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float = 1.0
    top_n_sigma: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams) -> Filter:
        """Return the filters of a request's rows."""
        return cls(*(getattr(params, name) for name in cls._fields))

    @property
    def keeps_all(self) -> bool:
        """True when every token that `typical_p` and `top_n_sigma` leave may be drawn."""
        return self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0


def uniform(seed: int, sample_idx: int, position: int) -> float:
    """Return the number in [0, 1) that decides one draw.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), used as a hash of a counter.
    """
    value = _mixed(seed)
    value = _mixed(value ^ sample_idx)
    value = _mixed(value ^ position)
    return (value >> 11) * 2.0**-53


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw(
    logits: torch.Tensor, filters: Sequence[Filter], points: torch.Tensor, *, is_sparse: bool = False
) -> torch.Tensor:
    """Sample tokens from the filtered distributions of a batch's rows.

    Filters apply in the order temperature, top_n_sigma, typical_p, min_p, top_k, top_p; each is applied to the tokens
    that the previous one kept.

    Source: top_p is nucleus sampling, arXiv 1904.09751; min_p is from arXiv 2407.01082.
    """
    temperature = logits.new_tensor([f.temperature for f in filters]).clamp_(min=torch.finfo(torch.float32).tiny)
    # The maximum is subtracted before the division: the greatest quotient is 0, so none overflows.
    logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    _truncate(logits, filters)
    whole = [row for row, f in enumerate(filters) if f.keeps_all]
    if len(whole) == len(filters):
        return invert_cdf(_weights(logits, is_sparse), points)
    drawn = torch.empty(points.shape, dtype=torch.int64, device=logits.device)
    if whole:
        rows = torch.tensor(whole, device=logits.device)
        drawn[rows] = invert_cdf(_weights(logits[rows], is_sparse), points[rows])
    filtered = [row for row, f in enumerate(filters) if not f.keeps_all]
    rows = torch.tensor(filtered, device=logits.device)
    _draw_filtered(logits, rows, [filters[row] for row in filtered], points, drawn)
    return drawn


def _weights(logits: torch.Tensor, is_sparse: bool) -> torch.Tensor:
    """Return the exponentials of logits whose maximum is 0, in place; values below 1e-37 may be 0."""
    if not is_sparse:
        return logits.exp_()
    # Results that underflow make the CPU libraries' `exp` several times slower.
    return torch.threshold_(logits.clamp_(min=-87.0).exp_(), 1.7e-38, 0.0)


def _truncate(logits: torch.Tensor, filters: Sequence[Filter]) -> None:
    """Apply top_n_sigma and typical_p, which need all tokens, in place; the greatest logit is 0 again afterwards."""
    near = [row for row, f in enumerate(filters) if f.top_n_sigma]
    if near:
        kept = logits[near]
        apply_top_n_sigma(kept, _float64([filters[row].top_n_sigma for row in near], logits.device))
        logits[near] = kept
    typical = [row for row, f in enumerate(filters) if f.typical_p < 1.0]
    if typical:
        kept = logits[typical]
        apply_typical_p(kept, _float64([filters[row].typical_p for row in typical], logits.device))
        logits[typical] = kept.sub_(kept.amax(-1, keepdim=True))


def _float64(values: list[float], device: torch.device) -> torch.Tensor:
    """Return parameters in float64, as Python has them: in float32 a share above 0 could round to 0."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def _draw_filtered(
    logits: torch.Tensor, rows: torch.Tensor, filters: Sequence[Filter], points: torch.Tensor, drawn: torch.Tensor
) -> None:
    """Sample for `rows` of the batch, from a top-k of the logits that is just wide enough to hold all kept tokens.

    Most nuclei fit into the first few hundred tokens; only rows whose nucleus does not are processed again, with the
    next of `WIDTHS`, and at last with the whole vocabulary. The kept tokens and their order do not depend on the width.
    """
    vocab_size, device = logits.shape[1], logits.device
    top_k = torch.tensor([min(f.top_k or vocab_size, vocab_size) for f in filters], device=device)
    top_p = _float64([f.top_p for f in filters], device)
    # Weights below the smallest float32 are 0 and are never drawn; so a min_p that rounds to 0 drops the same tokens.
    min_p = torch.tensor([f.min_p for f in filters], dtype=torch.float32, device=device)
    for width in (*(width for width in WIDTHS if width < vocab_size), vocab_size):
        values, ids = stable_topk(logits[rows], width)
        weights = values.exp_()
        ranks = torch.arange(width, device=device)
        kept = weights >= min_p[:, None]
        # Settled by count: all tokens that top_k and min_p keep are within the width.
        is_settled = (top_k <= width) | ~kept[:, -1]
        weights.masked_fill_(~kept | (ranks >= top_k[:, None]), 0.0)
        reached = weights.cumsum(-1, dtype=torch.float64)
        mass = reached[:, -1].clone()
        by_mass = ~is_settled & (top_k == vocab_size)
        if by_mass.any():
            mass[by_mass] = _mass(logits[rows[by_mass]], min_p[by_mass])
            is_settled |= by_mass & (reached[:, -1] >= top_p * mass)
        # A token is kept if the mass of the tokens before it is less than top_p; so the likeliest always is.
        last = torch.searchsorted(reached, (top_p * mass)[:, None])
        weights.masked_fill_(ranks > last, 0.0)
        chosen = ids.gather(1, invert_cdf(weights, points[rows]))
        drawn[rows[is_settled]] = chosen[is_settled]
        if is_settled.all():
            return
        is_open = ~is_settled
        rows, top_k, top_p, min_p = rows[is_open], top_k[is_open], top_p[is_open], min_p[is_open]


def _mass(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the total weight of the tokens that min_p keeps, float64 [R]; `logits` [R, V] are overwritten."""
    weights = logits.exp_()
    if min_p.any():
        weights.masked_fill_(weights < min_p[:, None], 0.0)
    return row_sums(weights)[:, 0]


def invert_cdf(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return the first column whose cumulative weight exceeds each point's share of the row's total.

    Sums are computed in float64 on two levels, by chunks and then within one chunk, so that no cumulative sum over a
    whole vocabulary is ever stored.
    """
    width = weights.shape[1]
    sums = chunk_sums(weights)
    reached = sums.cumsum(-1)
    target = points * reached[:, -1:]
    chunk = torch.searchsorted(reached, target, right=True)
    target = (target - (reached.gather(1, chunk) - sums.gather(1, chunk))).clamp_(min=0.0)
    columns = chunk[:, :, None] * CHUNK + torch.arange(CHUNK, device=weights.device)
    rows = torch.arange(len(weights), device=weights.device)[:, None, None]
    inner = weights[rows, columns.clamp(max=width - 1)].masked_fill_(columns >= width, 0.0)
    reached = inner.cumsum(-1, dtype=torch.float64)
    # The two levels round differently: clamp the target to below the chunk's total.
    total = reached[:, :, -1]
    target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))
    return chunk * CHUNK + torch.searchsorted(reached, target[:, :, None], right=True)[:, :, 0]
