"""A sampler for logits on a device: the host waits once a step, for the tokens and what is asked for beside them.

Rows that ask for what only the host does are sampled as by `Sampler`: filters of whole distributions, bias, allowed
tokens, suppressed ones, bad words, DRY, logits processors, several samples at once, and drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.errors import NO_TOKEN
from quire.execution.pinned import placed
from quire.execution.sampling.device_counts import CountedRow, DeviceCounts, RowPenalties
from quire.execution.sampling.device_draws import (
    NARROW,
    RowFilters,
    cool,
    draw_filtered,
    draw_whole,
    topk_in_order,
    uniform_numbers,
)
from quire.execution.sampling.logits_processing import KeepTokens, constrain
from quire.execution.sampling.logprobs import LOWEST
from quire.execution.sampling.row_sampling import BAD_LOGITS, SampledRow, SamplingState
from quire.execution.sampling.sampler import Sampler
from quire.ops.torch_rows import apply_token_bitmask
from quire.scheduling.plan import ItemResult, ScheduledSequence, StepPlan, TokenLogprobs
from quire.structured.mask_filler import GrammarStates

# States of a row, beside its token.
FINE, NOTHING_LEFT, BROKEN = range(3)


class RowParameters(NamedTuple):
    """The parameters of a step's rows, on the device.

    Args:
        greedy, whole, narrow, wide: int64, rows whose likeliest token is taken, that draw from all tokens, from at most
            `NARROW` of them, and from any number; None for none, or for all rows where the others are None.
        filters: filters of all rows.
        seeds, sample_idxs: int64 [R].
    """

    greedy: Tensor | None
    whole: Tensor | None
    narrow: Tensor | None
    wide: Tensor | None
    filters: RowFilters
    seeds: Tensor
    sample_idxs: Tensor


class Readable(Protocol):
    """Numbers that the host may have to wait for."""

    def tolist(self) -> Any:
        """Return them."""


class DrawnRows(NamedTuple):
    """Rows whose tokens are chosen on the device, with all that makes results of them.

    Args:
        items: items of the rows.
        found: token and state (`FINE` and others) of each row, [R, 2].
        errors: why the grammar of a row failed, or None.
        measured: rows with log probabilities, each with its number of likeliest tokens.
        measures: their numbers, see `DeviceSampler._measure`; None without such rows.
    """

    items: Sequence[ScheduledSequence]
    found: Readable
    errors: dict[int, str | None]
    measured: Sequence[tuple[int, int]] = ()
    measures: Readable | None = None


class DeviceSampler(Sampler):
    """Chooses the tokens that `Sampler` does; see there.

    Args:
        device: device of the logits.
        grammar_states: grammar states of constrained outputs.
        keep: applies their masks.
    """

    def __init__(
        self, device: torch.device, grammar_states: GrammarStates | None = None, keep: KeepTokens = apply_token_bitmask
    ) -> None:
        super().__init__(device, grammar_states, keep)
        self._counts = DeviceCounts(device)
        # The parameters of the last step, by its sequences: mostly those of the next one too.
        self._known: tuple[tuple[int, ...], RowParameters] = ((), _parameters((), 0, device))

    def begin_step(self, plan: StepPlan) -> None:
        """See `Sampler`."""
        super().begin_step(plan)
        if plan.finished_ids or any(item.new_sequence is not None for item in plan.items):
            self._known = ((), self._known[1])
            for seq_id in plan.finished_ids:
                self._counts.close(seq_id)
            for item in plan.items:
                if item.new_sequence is not None:
                    self._counts.close(item.seq_id)

    def sample(self, logits: Tensor, items: Sequence[ScheduledSequence]) -> list[ItemResult]:
        """Draw every item's tokens; see `Sampler`."""
        if len(logits) != len(items):
            return super().sample(logits, items)
        if self.is_greedy(items):
            greatest, chosen = logits.max(-1)
            found = torch.stack((chosen, greatest.isfinite().long())).tolist()
            if all(found[1]):
                return [ItemResult(item.seq_id, (token,)) for item, token in zip(items, found[0], strict=True)]
        own = [row for row, item in enumerate(items) if self._takes(item)]
        if len(own) == len(items):
            return self._sample_own(logits, items)
        others = [row for row in range(len(items)) if row not in set(own)]
        results = dict(zip(others, super().sample(logits[others], [items[row] for row in others]), strict=True))
        if own:
            results |= dict(zip(own, self._sample_own(logits[own], [items[row] for row in own]), strict=True))
        return [results[row] for row in range(len(items))]

    def _takes(self, item: ScheduledSequence) -> bool:
        """Say whether an item's token can be drawn without the host."""
        state = self.states[item.seq_id]
        params, adjustments = state.params, state.adjustments
        return not (
            item.num_samples != 1
            or item.num_draft
            or params.typical_p < 1.0
            or params.top_n_sigma
            or params.dry_multiplier
            or params.logits_processors
            or adjustments.allowed_ids is not None
            or adjustments.bad_words is not None
            or len(adjustments.bias_ids)
            or adjustments.is_suppressing(item.start + len(item.token_ids))
        )

    def _sample_own(self, logits: Tensor, items: Sequence[ScheduledSequence]) -> list[ItemResult]:
        """Draw the tokens of items that it takes, from float32 [R, V], overwritten."""
        return self._results(DrawnRows(items, *self._draw(logits, items)))

    def _draw(
        self, logits: Tensor, items: Sequence[ScheduledSequence]
    ) -> tuple[Tensor, dict[int, str | None], list[tuple[int, int]], Tensor | None]:
        """Choose the tokens of items, and return the other fields of `DrawnRows`; the host does not wait."""
        states = [self.states[item.seq_id] for item in items]
        positions = [item.start + len(item.token_ids) for item in items]
        measured = [row for row, state in enumerate(states) if state.params.measures_tokens]
        raw = None
        if measured:
            raw = logits.clone() if len(measured) == len(items) else logits[self._numbers(measured)]
        status = self._mark(logits, None)
        errors = constrain(
            logits, [(row, state.adjustments, positions[row]) for row, state in enumerate(states)], self.keep
        )
        is_changed = bool(errors) | self._penalize(logits, items, states)
        if is_changed:
            status = self._mark(logits, status)
        chosen = self._choose(logits, items, states, positions)
        counts = [(row, states[row].params.logprobs or 0) for row in measured]
        measures = None if raw is None else self._measure(raw, chosen, counts)
        return torch.stack((chosen, status), 1), errors, counts, measures

    def _results(self, drawn: DrawnRows) -> list[ItemResult]:
        """Read the tokens of rows, and return the results of their items."""
        items, errors = drawn.items, drawn.errors
        measures = {} if drawn.measures is None else _token_logprobs(drawn.measured, drawn.measures.tolist())
        rows = []
        for row, (token_id, what) in enumerate(drawn.found.tolist()):
            error = errors.get(row) or (None, NO_TOKEN, BAD_LOGITS)[what]
            if error is not None:
                rows.append(SampledRow(error=error))
                continue
            rows.append(SampledRow((token_id,), (measures[row],) if row in measures else ()))
        results = [one.result_of(item) for item, one in zip(items, rows, strict=True)]
        return results if self._grammar_states is None else self._grammar_states.append(items, results)

    def _mark(self, logits: Tensor, status: Tensor | None) -> Tensor:
        """Return what is wrong with rows, int64 [R], and make those that are wrong harmless.

        Args:
            logits: float32 [R, V].
            status: the result of the call before anything was forbidden; None in that call.
        """
        greatest = logits.amax(-1)
        is_wrong = ~greatest.isfinite()
        logits.masked_fill_(is_wrong[:, None], 0.0)
        if status is None:
            return torch.where(is_wrong, BROKEN, FINE)
        now = torch.where(greatest == -inf, NOTHING_LEFT, torch.where(is_wrong, BROKEN, FINE))
        return torch.where(status == FINE, now, status)

    def _penalize(self, logits: Tensor, items: Sequence[ScheduledSequence], states: Sequence[SamplingState]) -> bool:
        """Apply penalties; say whether there are any."""
        rows = [row for row, state in enumerate(states) if state.params.penalizes_tokens]
        if not rows:
            return False
        counted = []
        for row in rows:
            own = states[row].adjustments
            assert own.history is not None, "penalties have a history"
            counted.append(CountedRow(items[row], own.history, own.num_prompt))
        slots = self._counts.sync(counted, logits.shape[1], self._put_drawn)
        given = [states[row].params for row in rows]
        factors = torch.tensor(
            [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in given]
        )
        penalties = RowPenalties(self._numbers(rows), slots, *placed(factors, self._device).unbind(1))
        self._counts.penalize(logits, penalties)
        return True

    def _put_drawn(self, token_ids: Tensor, items: Sequence[ScheduledSequence]) -> None:
        """Replace placeholders, in int64 [n], by the tokens that they stand for: in place, and the host does not wait.

        The host has read all tokens when a step of this sampler begins, so there are none.
        """

    def _choose(
        self,
        logits: Tensor,
        items: Sequence[ScheduledSequence],
        states: Sequence[SamplingState],
        positions: Sequence[int],
    ) -> Tensor:
        """Return a token of each row, int64 [R]."""
        seq_ids = tuple(item.seq_id for item in items)
        if seq_ids != self._known[0]:
            self._known = seq_ids, _parameters(states, logits.shape[1], self._device)
        parameters = self._known[1]
        filters = parameters.filters
        drawing = (parameters.whole, parameters.narrow, parameters.wide)
        if all(rows is None for rows in drawing):
            return logits.argmax(-1)
        numbers = uniform_numbers(parameters.seeds, parameters.sample_idxs, self._numbers(positions))
        chosen = torch.empty(len(items), dtype=torch.int64, device=logits.device)
        if parameters.greedy is not None:
            chosen[parameters.greedy] = logits[parameters.greedy].argmax(-1)
        for rows, width in zip(drawing, (None, min(NARROW, logits.shape[1]), logits.shape[1]), strict=True):
            if rows is None:
                continue
            cooled = cool(logits[rows], filters.temperature[rows])
            if width is None:
                chosen[rows] = draw_whole(cooled, numbers[rows])
            else:
                chosen[rows] = draw_filtered(cooled, filters.of(rows), numbers[rows], width)
        return chosen

    def _measure(self, raw: Tensor, chosen: Tensor, measured: Sequence[tuple[int, int]]) -> Tensor:
        """Return what `_token_logprobs` reads, float64 [n, 3 + 2 * most], from logits [n, V] as the model gave them."""
        ids = chosen[self._numbers([row for row, _ in measured])][:, None]
        normed = raw.log_softmax(-1)
        above = torch.count_nonzero(raw > raw.gather(1, ids), dim=-1)[:, None]
        columns = [ids.double(), above.double() + 1.0, normed.gather(1, ids).clamp_(min=LOWEST).double()]
        most = max(count for _, count in measured)
        if most:
            top_ids = topk_in_order(raw, most)[1]
            columns += [top_ids.double(), normed.gather(1, top_ids).clamp_(min=LOWEST).double()]
        return torch.cat(columns, 1)

    def _numbers(self, values: Sequence[int]) -> Tensor:
        """Return whole numbers on the device."""
        return placed(torch.tensor(values, dtype=torch.int64), self._device)


def _token_logprobs(
    measured: Sequence[tuple[int, int]], numbers: Sequence[Sequence[float]]
) -> dict[int, TokenLogprobs]:
    """Return the log probabilities of some rows' tokens.

    Args:
        measured: rows, each with its number of likeliest tokens.
        numbers: token, rank and log probability of each; then the likeliest tokens, as many as the row with most of
            them has, and their log probabilities.
    """
    measures = {}
    for (row, count), values in zip(measured, numbers, strict=True):
        token_id, rank, logprob = int(values[0]), int(values[1]), values[2]
        most = (len(values) - 3) // 2
        if not most:
            measures[row] = TokenLogprobs(token_id, logprob, rank)
            continue
        listed = array("i", map(int, values[3 : 3 + count]))
        measures[row] = TokenLogprobs(token_id, logprob, rank, listed, array("d", values[3 + most :][:count]))
    return measures


def _parameters(states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> RowParameters:
    """Return the parameters of rows."""
    kinds: dict[str, list[int]] = {"greedy": [], "whole": [], "narrow": [], "wide": []}
    floats, wholes = [], []
    for row, state in enumerate(states):
        params, own = state.params, state.filter
        is_narrow = 0 < own.top_k <= NARROW
        kind = "greedy" if params.is_greedy else "whole" if own.keeps_all else "narrow" if is_narrow else "wide"
        kinds[kind].append(row)
        floats.append((own.temperature, own.top_p, own.min_p))
        seed = state.seed & ((1 << 64) - 1)
        most = min(own.top_k or vocab_size, vocab_size)
        wholes.append((most, seed - (1 << 64) if seed >> 63 else seed, state.sample_idx))
    temperature, top_p, min_p = placed(torch.tensor(floats, dtype=torch.float64).view(-1, 3), device).unbind(1)
    top_k, seeds, sample_idxs = placed(torch.tensor(wholes, dtype=torch.int64).view(-1, 3), device).unbind(1)
    temperature = temperature.float().clamp_(min=torch.finfo(torch.float32).tiny)
    greedy, whole, narrow, wide = (placed(torch.tensor(each), device) if each else None for each in kinds.values())
    filters = RowFilters(temperature, top_k, top_p, min_p.float())
    return RowParameters(greedy, whole, narrow, wide, filters, seeds, sample_idxs)
