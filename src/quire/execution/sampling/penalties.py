"""Penalties on tokens that were used: on single tokens, and DRY on repeated sequences of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.execution.sampling.token_history import TokenCounts
from quire.execution.sampling.token_masks import row_entries
from quire.sequences.params import SamplingParams

# Longer repetitions count as this long, which bounds the work for a text of many repetitions.
MAX_REPEATED = 128
# Limit of a DRY penalty, so that it is finite in float32; far above all logits.
MAX_PENALTY = 1e30


def penalize_tokens(logits: torch.Tensor, penalized: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Apply the repetition penalty to tokens seen anywhere, and the other two to tokens of the output.

    Source: CTRL, arXiv 1909.05858, for the repetition penalty.
    """
    device = logits.device
    sizes = torch.tensor([len(counts.ids) for _, _, counts in penalized])

    def per_token(values: list[float]) -> torch.Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.float32), sizes).to(device)

    where = row_entries([(row, counts.ids) for row, _, counts in penalized], device)
    seen = torch.cat([counts.seen for _, _, counts in penalized]).to(device)
    output = torch.cat([counts.output for _, _, counts in penalized]).to(device)
    repetition = per_token([params.repetition_penalty for _, params, _ in penalized])
    values = logits[where]
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen > 0, scaled, values)
    values -= per_token([params.frequency_penalty for _, params, _ in penalized]) * output
    values -= per_token([params.presence_penalty for _, params, _ in penalized]) * (output > 0)
    logits[where] = values


def penalize_repeats(row: torch.Tensor, tokens: torch.Tensor, params: SamplingParams, breakers: torch.Tensor) -> None:
    """Penalize tokens that would continue a repetition, the more the longer the repetition is (DRY).

    If the last `n` tokens occurred before, with `n` at least `dry_allowed_length`, the token that followed them there
    loses `dry_multiplier * dry_base ** (n - dry_allowed_length)`. If it followed several repetitions, the longest `n`
    counts. A repetition does not extend across a breaker, and no breaker is penalized.

    Args:
        row: logits of one sequence, float32 [V], changed.
        tokens: prompt and output, int32 [n], on the CPU.
        params: parameters of the request.
        breakers: token ids, int32 [B].

    Source: DRY, by "p-e-w", for text-generation-webui (2024).
    """
    if params.dry_penalty_last_n >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
    end = len(tokens) - 1
    is_breaker = torch.isin(tokens, breakers)
    since_breaker = end - int(is_breaker.nonzero()[-1]) if is_breaker.any() else end + 1
    limit = min(since_breaker, MAX_REPEATED)
    if limit < params.dry_allowed_length:
        return
    ends = (tokens[:end] == tokens[end]).nonzero()[:, 0]  # earlier positions of the last token
    ends = ends[~is_breaker[ends + 1]]
    lengths = torch.ones_like(ends)
    alike = torch.arange(len(ends))
    for length in range(1, limit):
        alike = alike[ends[alike] >= length]
        alike = alike[tokens[ends[alike] - length] == tokens[end - length]]
        if not len(alike):
            break
        lengths[alike] = length + 1
    is_long = lengths >= params.dry_allowed_length
    if not is_long.any():
        return
    ids, place = torch.unique(tokens[ends[is_long] + 1].long(), return_inverse=True)
    longest = torch.zeros_like(ids).scatter_reduce_(0, place, lengths[is_long], "amax")
    penalties = params.dry_multiplier * params.dry_base ** (longest - params.dry_allowed_length).double()
    row[ids.to(row.device)] -= penalties.clamp_(max=MAX_PENALTY).float().to(row.device)
