"""The sampler: from a step's logits to its tokens, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import isfinite

import torch

from quire.execution.adjustments import Adjustments, adjust
from quire.execution.draws import Filter, draw, uniform
from quire.execution.logprobs import measure, rows_per_tile
from quire.scheduling.plan import ItemResult, Opening, PlanItem, StepPlan, TokenLogprobs

BAD_LOGITS = "the model gave logits that are not finite numbers"
NO_TOKEN = (
    "no token is left to sample after allowed_token_ids, logit_bias, min_tokens, bad_words, penalties and"
    " logits_processors"
)


class SamplingState:
    """What the sampler keeps of one sequence from its opening until it is closed.

    Args:
        opening: what the plan says of the sequence.
        device: of the logits.
    """

    def __init__(self, opening: Opening, device: torch.device) -> None:
        params = opening.params
        self.params = params
        self.seed = opening.seed
        self.sample_idx = opening.sample_idx
        self.prompt_ids = opening.token_ids[: opening.num_prompt] if params.prompt_logprobs is not None else ()
        self.adjustments = Adjustments(opening, device)
        self.filter = Filter(
            params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p, params.top_n_sigma
        )


class Sampler:
    """Chooses tokens, and keeps what that takes of each open sequence.

    Args:
        device: of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, SamplingState] = {}

    @property
    def num_open(self) -> int:
        """Sequences that are open."""
        return len(self._states)

    def follow(self, plan: StepPlan) -> None:
        """Forget the closed sequences, meet the opened ones, and learn the tokens of this step."""
        for seq_id in plan.closed:
            self._states.pop(seq_id, None)
        for item in plan.items:
            if item.opening is not None:
                self._states[item.seq_id] = SamplingState(item.opening, self._device)
            history = self._states[item.seq_id].adjustments.history
            if history is not None:
                history.follow(item.start, item.token_ids, is_end=item.num_samples > 0)

    def sample(self, logits: torch.Tensor, items: Sequence[PlanItem]) -> list[ItemResult]:
        """Draw every item's tokens.

        A row whose logits are not finite is an error of its item alone.

        Args:
            logits: float32 [R, V], overwritten: row `r` is of the last token of `items[r]`.
            items: those with `num_samples` of at least 1, in any order; no item's result depends on the others.
        """
        states = [self._states[item.seq_id] for item in items]
        positions = [item.start + len(item.token_ids) for item in items]
        adjusted = [row for row, state in enumerate(states) if not state.adjustments.is_none(positions[row])]
        measured = [row for row, state in enumerate(states) if state.params.measures_tokens]
        if not adjusted and all(state.params.is_greedy for state in states):
            greatest, chosen = logits.max(-1, keepdim=True)
            errors = _refuse(logits, greatest, BAD_LOGITS)
            raw = logits[measured] if measured else logits
        else:
            errors = _refuse(logits, logits.amax(-1, keepdim=True), BAD_LOGITS)
            raw = logits[measured] if measured else logits
            if adjusted:
                failed = adjust(logits, [(row, states[row].adjustments, positions[row]) for row in adjusted])
                errors = _refuse(logits, logits.amax(-1, keepdim=True), NO_TOKEN) | failed | errors
            chosen = _choose(logits, states, items)
        token_ids = [
            tuple(ids * item.num_samples)[: item.num_samples] for item, ids in zip(items, chosen.tolist(), strict=True)
        ]
        counts = [states[row].params.logprobs or 0 for row in measured]
        logprobs = dict(zip(measured, _measure_drawn(raw, [token_ids[row] for row in measured], counts), strict=True))
        return [
            ItemResult(item.seq_id, (), error=errors[row])
            if row in errors
            else ItemResult(item.seq_id, token_ids[row], logprobs.get(row, ()))
            for row, item in enumerate(items)
        ]

    def prompt_targets(self, item: PlanItem) -> tuple[tuple[int, ...], int]:
        """Return the prompt tokens that the item's first hidden states predict, where the request wants them measured.

        Returns:
            The prompt's tokens at `[start + 1, min(start + len + 1, num_prompt))`, or none; and how many of the
            likeliest tokens to list beside each.
        """
        state = self._states[item.seq_id]
        end = item.start + len(item.token_ids) + 1
        return state.prompt_ids[item.start + 1 : end], state.params.prompt_logprobs or 0


def _refuse(logits: torch.Tensor, greatest: torch.Tensor, error: str) -> dict[int, str]:
    """Return an error for each row whose greatest logit [R, 1] is not finite, and make it harmless to the others."""
    rows = [row for row, (value,) in enumerate(greatest.tolist()) if not isfinite(value)]
    for row in rows:
        logits[row].zero_()
    return dict.fromkeys(rows, error)


def _choose(logits: torch.Tensor, states: Sequence[SamplingState], items: Sequence[PlanItem]) -> torch.Tensor:
    """Return `num_samples` tokens of each row, int64 [R, n], n that of the greediest item for samples."""
    num_draws = max(item.num_samples for item in items)
    drawing = [row for row, state in enumerate(states) if not state.params.is_greedy]
    filters = [states[row].filter for row in drawing]
    points = torch.zeros((len(drawing), num_draws), dtype=torch.float64)
    for place, row in enumerate(drawing):
        state, item = states[row], items[row]
        position = item.start + len(item.token_ids)
        numbers = [uniform(state.seed, state.sample_idx + draw_idx, position) for draw_idx in range(item.num_samples)]
        points[place, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    points = points.to(logits.device)
    if len(drawing) == len(items):
        return draw(logits, filters, points)
    chosen = logits.argmax(-1, keepdim=True).repeat(1, num_draws)
    if drawing:
        chosen[drawing] = draw(logits[drawing], filters, points)
    return chosen


def _measure_drawn(
    raw: torch.Tensor, token_ids: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[tuple[TokenLogprobs, ...]]:
    """Measure all tokens drawn from each row of `raw`, float32 [R, V], in tiles of bounded size."""
    rows = [row for row, ids in enumerate(token_ids) for _ in ids]
    flat = [token_id for ids in token_ids for token_id in ids]
    measures: list[TokenLogprobs] = []
    tile = rows_per_tile(raw.shape[1])
    for start in range(0, len(rows), tile):
        part = slice(start, start + tile)
        measures += measure(raw[rows[part]], flat[part], [counts[row] for row in rows[part]])
    remaining = iter(measures)
    return [tuple(islice(remaining, len(ids))) for ids in token_ids]
