"""What a request does to its logits before a token is chosen: masks, bias and penalties."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.execution.history import TokenCounts, TokenHistory
from quire.scheduling.plan import Opening
from quire.sequences.params import SamplingParams


class Adjustments:
    """One sequence's changes of its logits.

    Args:
        opening: what the plan says of the sequence.
        device: of the logits.
    """

    def __init__(self, opening: Opening, device: torch.device) -> None:
        params = opening.params
        bias = params.logit_bias or {}
        self.params = params
        self.num_prompt = opening.num_prompt
        self.history = TokenHistory(opening.token_ids, opening.num_prompt) if params.needs_history else None
        self.allowed_ids = None
        if params.allowed_token_ids is not None:
            self.allowed_ids = torch.tensor(params.allowed_token_ids, dtype=torch.int64, device=device)
        self.bias_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        suppressed_ids = opening.suppressed_ids if params.min_tokens else ()
        self.suppressed_ids = torch.tensor(suppressed_ids, dtype=torch.int64, device=device)

    def is_none(self, position: int) -> bool:
        """True when the logits of the token at `position` stay as they are."""
        return (
            self.history is None
            and self.allowed_ids is None
            and len(self.bias_ids) == 0
            and not self.is_suppressing(position)
        )

    def is_suppressing(self, position: int) -> bool:
        """True while fewer than `min_tokens` output tokens come before `position`."""
        return len(self.suppressed_ids) > 0 and position - self.num_prompt < self.params.min_tokens


def adjust(logits: torch.Tensor, rows: Sequence[tuple[int, Adjustments, int]]) -> None:
    """Apply to the named rows, in place: allowed tokens, bias, suppressed tokens, then penalties.

    Args:
        logits: float32 [R, V].
        rows: row, its sequence's adjustments, and the position of the token that the row's logits are for.
    """
    for row, own, _ in rows:
        if own.allowed_ids is not None:
            kept = logits[row, own.allowed_ids]
            logits[row].fill_(-torch.inf)
            logits[row, own.allowed_ids] = kept
    biased = [(row, own) for row, own, _ in rows if len(own.bias_ids)]
    if biased:
        places = _places([(row, own.bias_ids) for row, own in biased], logits.device)
        logits[places] += torch.cat([own.bias for _, own in biased])
    suppressed = [(row, own.suppressed_ids) for row, own, position in rows if own.is_suppressing(position)]
    # End tokens come from configurations, which may name ids that the head does not have.
    suppressed = [(row, ids[ids < logits.shape[1]]) for row, ids in suppressed]
    if suppressed:
        logits[_places(suppressed, logits.device)] = -torch.inf
    penalized = [(row, own.params, own.history.counts()) for row, own, _ in rows if own.history is not None]
    if penalized:
        _penalize(logits, penalized)


def _penalize(logits: torch.Tensor, penalized: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Apply the repetition penalty to tokens seen anywhere, and the other two to tokens of the output.

    Source: CTRL, arXiv 1909.05858, for the repetition penalty.
    """
    device = logits.device
    sizes = torch.tensor([len(counts.ids) for _, _, counts in penalized])

    def per_token(values: list[float]) -> torch.Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.float32), sizes).to(device)

    places = _places([(row, counts.ids) for row, _, counts in penalized], device)
    seen = torch.cat([counts.seen for _, _, counts in penalized]).to(device)
    output = torch.cat([counts.output for _, _, counts in penalized]).to(device)
    repetition = per_token([params.repetition_penalty for _, params, _ in penalized])
    values = logits[places]
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen > 0, scaled, values)
    values -= per_token([params.frequency_penalty for _, params, _ in penalized]) * output
    values -= per_token([params.presence_penalty for _, params, _ in penalized]) * (output > 0)
    logits[places] = values


def _places(entries: Sequence[tuple[int, torch.Tensor]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row index and the token id of every entry, both int64 [number of ids of all entries]."""
    rows = torch.tensor([row for row, _ in entries])
    sizes = torch.tensor([len(ids) for _, ids in entries])
    return torch.repeat_interleave(rows, sizes).to(device), torch.cat([ids for _, ids in entries]).to(device)
