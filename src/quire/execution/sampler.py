"""The sampler: from a step's logits to its tokens, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import isfinite

import torch

from quire.execution.adjustments import Adjustments, adjust
from quire.execution.beams import BeamRow, find_candidates
from quire.execution.draws import Filter, draw, uniform
from quire.execution.history import TokenHistory
from quire.execution.logprobs import measure, rows_per_tile
from quire.scheduling.plan import (
    BeamGroup,
    Candidate,
    ItemResult,
    Opening,
    PlanItem,
    StepPlan,
    TokenLogprobs,
    plain_results,
)

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

    @property
    def is_plain(self) -> bool:
        """Say whether every token is the likeliest, and nothing else is asked of it."""
        params = self.params
        is_greedy = params.is_greedy and params.min_tokens == 0 and not params.measures_tokens
        return is_greedy and self.adjustments.is_none(0)


class Sampler:
    """Chooses tokens, and keeps what that takes of each open sequence.

    Args:
        device: of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, SamplingState] = {}
        # Of the open sequences, those that take more than a look for the greatest logit; and two kinds of them.
        self._special: dict[int, SamplingState] = {}
        self._with_history: dict[int, TokenHistory] = {}
        self._with_prompt: dict[int, SamplingState] = {}

    @property
    def measures_prompts(self) -> bool:
        """Say whether an open sequence wants its prompt measured; without one, no item has prompt targets."""
        return bool(self._with_prompt)

    @property
    def num_open(self) -> int:
        """Sequences that are open."""
        return len(self._states)

    def follow(self, plan: StepPlan) -> None:
        """Forget the closed sequences, meet the opened ones, and learn the tokens of this step."""
        for seq_id in plan.closed:
            self._close(seq_id)
        for item in plan.items:
            if item.opening is not None:
                self._open(item.seq_id, item.opening)
        if self._with_history:
            for item in plan.items:
                history = self._with_history.get(item.seq_id)
                if history is not None:
                    history.follow(item.start, item.token_ids, is_end=item.num_samples > 0)

    def _close(self, seq_id: int) -> None:
        for known in (self._states, self._special, self._with_history, self._with_prompt):
            known.pop(seq_id, None)

    def _open(self, seq_id: int, opening: Opening) -> None:
        self._close(seq_id)  # an opening replaces all that was known
        state = self._states[seq_id] = SamplingState(opening, self._device)
        history = state.adjustments.history
        if history is not None:
            self._with_history[seq_id] = history
        if state.prompt_ids:
            self._with_prompt[seq_id] = state
        if not state.is_plain:
            self._special[seq_id] = state

    def sample(self, logits: torch.Tensor, items: Sequence[PlanItem]) -> list[ItemResult]:
        """Draw every item's tokens.

        A row whose logits are not finite is an error of its item alone.

        Args:
            logits: float32 [R, V], overwritten: row `r` is of the last token of `items[r]`.
            items: those with `num_samples` of at least 1, in any order; no item's result depends on the others.
        """
        special = self._special
        if not any(item.num_samples > 1 or item.seq_id in special for item in items):
            results = _take_likeliest(logits, items)
            if results is not None:
                return results
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

    def search(
        self, logits: torch.Tensor, items: Sequence[PlanItem], groups: Sequence[BeamGroup]
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Draw the tokens of a step in which some items are beams, and find the candidates of those.

        Args:
            logits: see `sample`.
            items: see `sample`.
            groups: which of the items are beams, and belong together; their scores.

        Returns:
            A result for each item, and the candidates of each group: none where an item of it failed.
        """
        row_of = {item.seq_id: row for row, item in enumerate(items)}
        rows = [row_of[seq_id] for group in groups for seq_id in group.seq_ids]
        searching = set(rows)
        others = [row for row in range(len(items)) if row not in searching]
        drawn = iter(self.sample(logits[others], [items[row] for row in others]) if others else ())
        own = logits if rows == list(range(len(items))) else logits[rows]
        errors = _refuse(own, own.amax(-1, keepdim=True), BAD_LOGITS)
        states = [self._states[items[row].seq_id] for row in rows]
        ends = [items[row].start + len(items[row].token_ids) for row in rows]
        known = [BeamRow(one.adjustments, end, one.params.logprobs) for one, end in zip(states, ends, strict=True)]
        found, failed = find_candidates(own, known, groups)
        failures = {items[rows[place]].seq_id: error for place, error in (failed | errors).items()}
        results = [
            ItemResult(item.seq_id, (), error=failures.get(item.seq_id)) if row in searching else next(drawn)
            for row, item in enumerate(items)
        ]
        whole = [not any(seq_id in failures for seq_id in group.seq_ids) for group in groups]
        return results, tuple(own if is_whole else () for own, is_whole in zip(found, whole, strict=True))

    def prompt_targets(self, item: PlanItem) -> tuple[tuple[int, ...], int]:
        """Return the prompt tokens that the item's first hidden states predict, where the request wants them measured.

        Returns:
            The prompt's tokens at `[start + 1, min(start + len + 1, num_prompt))`, or none; and how many of the
            likeliest tokens to list beside each.
        """
        state = self._states[item.seq_id]
        end = item.start + len(item.token_ids) + 1
        return state.prompt_ids[item.start + 1 : end], state.params.prompt_logprobs or 0


def _take_likeliest(logits: torch.Tensor, items: Sequence[PlanItem]) -> list[ItemResult] | None:
    """Return the likeliest token of each row, or None where the greatest logit of some row is not finite."""
    greatest, chosen = logits.max(-1, keepdim=True)
    if not all(map(isfinite, greatest.flatten().tolist())):
        return None
    return plain_results([item.seq_id for item in items], map(tuple, chosen.tolist()))


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
