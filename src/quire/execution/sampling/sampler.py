"""The sampler: from a step's logits to its tokens, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import isfinite

import torch

from quire.errors import describe
from quire.execution.sampling.beam_candidates import BeamRow, find_candidates
from quire.execution.sampling.logits_processing import KeepTokens
from quire.execution.sampling.row_sampling import BAD_LOGITS, Row, SampledRow, SamplingState, refuse, sample_rows
from quire.execution.sampling.token_history import TokenHistory
from quire.ops.torch_rows import apply_token_bitmask
from quire.scheduling.plan import (
    BeamGroup,
    Candidate,
    ItemResult,
    NewSequence,
    ScheduledSequence,
    StepPlan,
    plain_results,
)
from quire.structured.mask_filler import GrammarStates


class Sampler:
    """Chooses tokens, and keeps what that takes of each open sequence.

    Args:
        device: device of the logits.
        grammar_states: grammar states of constrained outputs; None where no request can be constrained.
        keep: applies their masks.
    """

    def __init__(
        self, device: torch.device, grammar_states: GrammarStates | None = None, keep: KeepTokens = apply_token_bitmask
    ) -> None:
        self._device = device
        self._grammar_states = grammar_states
        self._keep = keep
        self._states: dict[int, SamplingState] = {}
        # Open sequences that need more than the greatest logit; and two kinds of them.
        self._special: dict[int, SamplingState] = {}
        self._with_history: dict[int, TokenHistory] = {}
        self._with_prompt: dict[int, SamplingState] = {}
        # True while sequences with a grammar are open, and for one more step: the last ones have to be let go.
        self._has_grammars = False

    @property
    def num_open(self) -> int:
        """Sequences that are open."""
        return len(self._states)

    def begin_step(self, plan: StepPlan) -> None:
        """Forget the closed sequences, meet the opened ones, and learn the tokens of this step."""
        for seq_id in plan.finished_ids:
            self._close(seq_id)
        for item in plan.items:
            if item.new_sequence is not None:
                self._open(item.seq_id, item.new_sequence)
        self._begin(plan.items)

    def _begin(self, items: Sequence[ScheduledSequence]) -> None:
        """Sync histories and grammar states to the tokens before those that are drawn."""
        if self._with_history:
            for item in items:
                history = self._with_history.get(item.seq_id)
                if history is not None:
                    # Drafts are learnt one by one, as they turn out to be right.
                    certain = item.token_ids[: len(item.token_ids) - item.num_draft]
                    history.sync(item.start, certain, is_end=item.num_samples > 0)
        if self._grammar_states is not None and self._has_grammars:
            self._grammar_states.begin(items)
            self._has_grammars = self._grammar_states.num_open > 0

    def _close(self, seq_id: int) -> None:
        if self._grammar_states is not None:
            self._grammar_states.close(seq_id)
        for known in (self._states, self._special, self._with_history, self._with_prompt):
            known.pop(seq_id, None)

    def _open(self, seq_id: int, new_sequence: NewSequence) -> None:
        self._close(seq_id)  # an opening replaces all that was known
        grammar_state = None if self._grammar_states is None else self._grammar_states.open(seq_id, new_sequence)
        self._has_grammars |= grammar_state is not None
        state = self._states[seq_id] = SamplingState(new_sequence, self._device, grammar_state)
        history = state.adjustments.history
        if history is not None:
            self._with_history[seq_id] = history
        if state.prompt_ids:
            self._with_prompt[seq_id] = state
        if not state.is_plain:
            self._special[seq_id] = state

    def sample(self, logits: torch.Tensor, items: Sequence[ScheduledSequence]) -> list[ItemResult]:
        """Draw every item's tokens.

        A row whose logits are not finite is an error of its item alone, where a run gets so far.

        Args:
            logits: float32 [R, V], overwritten: the rows of each item's last token, and of the `num_draft` before it.
            items: those with `num_samples` of at least 1, in any order; no item's result depends on the others.
        """
        special = self._special
        if not any(item.num_samples > 1 or item.seq_id in special for item in items):
            results = _take_likeliest(logits, items)
            if results is not None:
                return results
        states = [self._states[item.seq_id] for item in items]
        if len(logits) > len(items):
            results = _verify(logits, items, states, self._keep)
        else:
            rows = [
                Row(state, item.start + len(item.token_ids), item.num_samples)
                for state, item in zip(states, items, strict=True)
            ]
            drawn = sample_rows(logits, rows, self._keep)
            results = [one.result_of(item) for item, one in zip(items, drawn, strict=True)]
        return results if self._grammar_states is None else self._grammar_states.append(items, results)

    def search(
        self, logits: torch.Tensor, items: Sequence[ScheduledSequence], groups: Sequence[BeamGroup]
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Draw the tokens of a step, and find the candidates of those items that are beams.

        Args:
            logits: see `sample`.
            items: see `sample`.
            groups: beam groups among the items, with their scores; None without searches.

        Returns:
            A result for each item, and the candidates of each group: none where an item of it failed.
        """
        if not groups:
            return self.sample(logits, items), ()
        item_idx_of = {item.seq_id: item_idx for item_idx, item in enumerate(items)}
        beam_idxs = [item_idx_of[seq_id] for group in groups for seq_id in group.seq_ids]
        searching = set(beam_idxs)
        # A beam has one row; another item one more for each draft.
        starts = list(accumulate((1 + item.num_draft for item in items), initial=0))
        others = [item_idx for item_idx in range(len(items)) if item_idx not in searching]
        other_rows = [row for item_idx in others for row in range(starts[item_idx], starts[item_idx + 1])]
        drawn = iter(self.sample(logits[other_rows], [items[item_idx] for item_idx in others]) if others else ())
        rows = [starts[item_idx] for item_idx in beam_idxs]
        own = logits if rows == list(range(len(logits))) else logits[rows]
        errors = refuse(own, own.amax(-1, keepdim=True), BAD_LOGITS)
        states = [self._states[items[item_idx].seq_id] for item_idx in beam_idxs]
        ends = [items[item_idx].start + len(items[item_idx].token_ids) for item_idx in beam_idxs]
        known = [BeamRow(one.adjustments, end, one.params.logprobs) for one, end in zip(states, ends, strict=True)]
        found, failed = find_candidates(own, known, groups, self._keep)
        failures = {items[beam_idxs[row]].seq_id: error for row, error in (failed | errors).items()}
        results = [
            SampledRow(error=failures.get(item.seq_id)).result_of(item) if item_idx in searching else next(drawn)
            for item_idx, item in enumerate(items)
        ]
        whole = [not any(seq_id in failures for seq_id in group.seq_ids) for group in groups]
        return results, tuple(own if is_whole else () for own, is_whole in zip(found, whole, strict=True))

    def sample_apart(
        self,
        logits_of: Callable[[list[int]], torch.Tensor],
        items: Sequence[ScheduledSequence],
        groups: Sequence[BeamGroup],
    ) -> tuple[list[ItemResult], tuple[tuple[Candidate, ...], ...]]:
        """Sample the items of a step one by one, the beams of a search together, after all at once have failed.

        So whatever one of them asks for, the others get their tokens.

        Args:
            logits_of: computes the logits of some of the step's rows again, float32 [R, V].
            items: see `sample`.
            groups: see `search`.

        Returns:
            See `search`; an item that fails again has an error.
        """
        self._begin(items)
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
                drawn, candidates = self.search(logits, own, own_groups)
            except Exception as error:
                reason = f"its tokens could not be sampled ({describe(error)})"
                drawn = [ItemResult(item.seq_id, (), error=reason) for item in own]
                candidates = ((),) * len(own_groups)
            results |= {result.seq_id: result for result in drawn}
            found += candidates
        return [results[item.seq_id] for item in items], tuple(found)

    def measures_prompts(self, items: Iterable[ScheduledSequence]) -> bool:
        """Say whether an item has prompt targets."""
        measured = self._with_prompt
        return bool(measured) and any(
            item.seq_id in measured and item.start + 1 < len(measured[item.seq_id].prompt_ids) for item in items
        )

    def prompt_targets(self, item: ScheduledSequence) -> tuple[tuple[int, ...], int]:
        """Return the prompt tokens that the item's first hidden states predict, where the request wants them measured.

        Returns:
            The prompt's tokens at `[start + 1, min(start + len + 1, num_prompt))`, or none; and how many of the
            likeliest tokens to list beside each.
        """
        state = self._states[item.seq_id]
        end = item.start + len(item.token_ids) + 1
        return state.prompt_ids[item.start + 1 : end], state.params.prompt_logprobs or 0


def _take_likeliest(logits: torch.Tensor, items: Sequence[ScheduledSequence]) -> list[ItemResult] | None:
    """Return the likeliest token of each row, or None where the greatest logit of some row is not finite."""
    greatest, chosen = logits.max(-1, keepdim=True)
    if not all(map(isfinite, greatest.flatten().tolist())):
        return None
    seq_ids = [item.seq_id for item in items]
    if len(logits) == len(items):
        return plain_results(seq_ids, map(tuple, chosen.tolist()))
    token_ids = chosen[:, 0].tolist()
    ends = accumulate(1 + item.num_draft for item in items)
    return plain_results(
        seq_ids, [_run(item, token_ids[end - 1 - item.num_draft : end]) for item, end in zip(items, ends, strict=True)]
    )


def _run(item: ScheduledSequence, drawn: Sequence[int]) -> tuple[int, ...]:
    """Return the drawn tokens up to the first that differs from its draft."""
    certain = len(item.token_ids) - item.num_draft
    for draft_idx, (token_id, draft) in enumerate(zip(drawn, item.token_ids[certain:], strict=False), 1):
        if token_id != draft:
            return tuple(drawn[:draft_idx])
    return tuple(drawn)


def _verify(
    logits: torch.Tensor, items: Sequence[ScheduledSequence], states: Sequence[SamplingState], keep: KeepTokens
) -> list[ItemResult]:
    """Draw a run for each item.

    At each of its rows the token is drawn that would be drawn without drafts, from the same distribution with the same
    random number; so as long as the drafts are those tokens, the rows after them are those that would have come. For a
    draft that is certain, that is rejection sampling: it is accepted as often as it would have been drawn, and what
    takes its place is distributed as what else would have been.

    Rows that look at the tokens before them are drawn in turn, all items' together; the others at once.

    Args:
        logits: see `Sampler.sample`.
        items: items, some of which have drafts.
        states: sampling states of their sequences.
        keep: see `Sampler`.

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
    return [_run_result(item, run) for item, run in zip(items, runs, strict=True)]


def _learn_draft(item: ScheduledSequence, state: SamplingState, draft_idx: int, drawn: SampledRow) -> bool:
    """Say whether a draft, the item's `draft_idx`-th from 1 on, was drawn; if so, the sequence's history has it."""
    offset = len(item.token_ids) - item.num_draft + draft_idx - 1
    draft = item.token_ids[offset : offset + 1]
    if drawn.token_ids != tuple(draft):
        return False
    if state.adjustments.history is not None:
        state.adjustments.history.sync(item.start + offset, draft, is_end=True)
    return True


def _run_result(item: ScheduledSequence, rows: Sequence[SampledRow]) -> ItemResult:
    """Return what the rows of an item gave, up to the first error."""
    if rows[0].error is not None or not item.num_draft:
        return rows[0].result_of(item)
    # Where a later row has an error, the next step comes upon it; what was accepted before stands.
    sound = next((row_idx for row_idx, drawn in enumerate(rows) if drawn.error is not None), len(rows))
    run = _run(item, [drawn.token_ids[0] for drawn in rows[:sound]])
    logprobs = tuple(drawn.logprobs[0] for drawn in rows[: len(run)] if drawn.logprobs)
    return ItemResult(item.seq_id, run, logprobs)
