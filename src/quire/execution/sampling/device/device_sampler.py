"""A sampler for logits on a device: the host waits once per step, for the tokens and their log probabilities.

Rows with options that only the host implements are sampled as by `Sampler`: filters of whole distributions, bias,
allowed tokens, suppressed ones, bad words, DRY, logits processors, several samples at once, and drafts whose rows
depend on the tokens before them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.errors import NO_TOKEN
from quire.execution.capture.decode_rows import drawn_rows_of
from quire.execution.sampling.device.device_counts import CountedRow, DeviceCounts, RowPenalties
from quire.execution.sampling.device.device_draws import TorchDraws, topk_in_order
from quire.execution.sampling.device.known_rows import KnownPenalties, KnownRows, know_rows, whole_numbers
from quire.execution.sampling.logits_processing import KeepTokens, constrain
from quire.execution.sampling.logprobs import LOWEST
from quire.execution.sampling.row_sampling import BAD_LOGITS, SampledRow, SamplingState
from quire.execution.sampling.sampler import Sampler, plain_results
from quire.execution.sampling.verification import run_result
from quire.ops.interface.token_draws import NARROW, DrawsTokens
from quire.ops.pytorch.torch_rows import apply_token_bitmask
from quire.scheduling.decode_columns import DecodeItems, DecodeResults
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, TokenLogprobs
from quire.sequences.params import SamplingParams
from quire.text.structured.mask_filler import GrammarStates

# Getters for `map`, without a Python call per item.
SEQ_ID: Final = attrgetter("seq_id")
_NUM_SAMPLES: Final = attrgetter("num_samples")
# Maximum number of cached sets of rows: all items of a step, and those of them that are sampled on the device.
_MOST_KNOWN: Final = 4


class Readable(Protocol):
    """Values that the host may have to wait for."""

    def tolist(self) -> Any:
        """Return the values; wait for them if needed."""


class DrawnRows(NamedTuple):
    """Rows that are sampled on the device, with all inputs of their results.

    Args:
        items: items of the rows.
        found: tokens and states of the rows, [2, R]; see `DrawsTokens`.
        errors: error of each row with a grammar, by row; None where it did not fail.
        measured: rows with log probabilities, each with its number of top tokens.
        measures: their log probabilities, see `DeviceSampler._measure`; None without such rows.
    """

    items: Sequence[ScheduledSequence]
    found: Readable
    errors: dict[int, str | None]
    measured: Sequence[tuple[int, int]] = ()
    measures: Readable | None = None


class DeviceSampler(Sampler):
    """Samples the same tokens as `Sampler`, on the device; see there.

    Args:
        device: device of the logits.
        grammar_states: grammar states of constrained outputs.
        keep: applies their masks.
        draws: the backend's sampling kernels; None for torch's operators.
    """

    def __init__(
        self,
        device: torch.device,
        grammar_states: GrammarStates | None = None,
        keep: KeepTokens = apply_token_bitmask,
        draws: DrawsTokens | None = None,
    ) -> None:
        super().__init__(device, grammar_states, keep)
        self._draws = TorchDraws() if draws is None else draws
        self._counts = DeviceCounts(device)
        # Open sequences of which the host samples some or all rows.
        self._on_host: dict[int, SamplingState] = {}
        # Parameters of rows, by their sequence ids: usually the next step has the same sequences.
        self._known: dict[tuple[int, ...], KnownRows] = {}
        # The `seq_ids` list of the last `DecodeItems`, and the parameters of its rows.
        self._last: tuple[list[int], KnownRows] | None = None

    def _close(self, seq_id: int) -> None:
        super()._close(seq_id)
        self._known.clear()
        self._last = None
        self._counts.close(seq_id)
        self._on_host.pop(seq_id, None)

    def _open(self, seq_id: int, new_sequence: NewSequence) -> None:
        super()._open(seq_id, new_sequence)
        state = self.states[seq_id]
        if state.needs_host or state.adjustments.suppressed_until:
            self._on_host[seq_id] = state

    def sample(
        self, logits: Tensor, items: Sequence[ScheduledSequence], positions: Tensor | None = None
    ) -> list[ItemResult]:
        """Sample every item's tokens; see `Sampler`.

        Args:
            logits, items: see `Sampler`.
            positions: position of the token that each row samples, int64 [R] on the device; None copies them there.
        """
        if len(logits) != len(items):
            return self._verify(logits, items, positions)
        if not self._on_host and (isinstance(items, DecodeItems) or max(map(_NUM_SAMPLES, items)) == 1):
            return self._sample_own(logits, items, positions)
        own = [row for row, item in enumerate(items) if self._takes(item)]
        if len(own) == len(items):
            return self._sample_own(logits, items, positions)
        others = [row for row in range(len(items)) if row not in set(own)]
        results = dict(zip(others, super().sample(logits[others], [items[row] for row in others]), strict=True))
        if own:
            results |= dict(zip(own, self._sample_own(logits[own], [items[row] for row in own]), strict=True))
        return [results[row] for row in range(len(items))]

    def _verify(self, logits: Tensor, items: Sequence[ScheduledSequence], positions: Tensor | None) -> list[ItemResult]:
        """Sample items, some with drafts: all rows at once, as `verify` does where no row depends on earlier ones."""
        rows = drawn_rows_of(items)
        looks_back = any(item.num_draft and self.states[item.seq_id].looks_back for item in items)
        if looks_back or not all(map(self._takes, rows)):
            return super().sample(logits, items)
        return self._take_runs(items, DrawnRows(rows, *self._draw(logits, rows, positions)))

    def _take_runs(self, items: Sequence[ScheduledSequence], drawn: DrawnRows) -> list[ItemResult]:
        """Return the results of items, given the rows of their drafts and of the tokens before these."""
        return self._runs(items, drawn)

    def _runs(self, items: Sequence[ScheduledSequence], drawn: DrawnRows) -> list[ItemResult]:
        """Read rows, and return the results of their items."""
        of_rows = iter(_row_results(drawn))
        runs = [run_result(item, list(islice(of_rows, 1 + item.num_draft))) for item in items]
        return list(self._follow(items, runs, drawn))

    def _takes(self, item: ScheduledSequence) -> bool:
        """Say whether an item, without drafts, can be sampled on the device."""
        if item.num_samples != 1:
            return False
        state = self._on_host.get(item.seq_id)
        if state is None:
            return True
        return not (state.needs_host or state.adjustments.is_suppressing(_next_position(item)))

    def _sample_own(
        self, logits: Tensor, items: Sequence[ScheduledSequence], positions: Tensor | None = None
    ) -> list[ItemResult]:
        """Sample items that `_takes` accepts, from float32 logits [R, V], overwritten; see `sample`."""
        return list(self._results(DrawnRows(items, *self._draw(logits, items, positions))))

    def _draw(
        self, logits: Tensor, items: Sequence[ScheduledSequence], positions: Tensor | None
    ) -> tuple[Tensor, dict[int, str | None], Sequence[tuple[int, int]], Tensor | None]:
        """Sample items on the device; return the fields of `DrawnRows` after `items`; the host does not wait."""
        known, draws = self._rows(items, logits.shape[1]), self._draws
        if known.parameters is None:
            return draws.draw_tokens(logits, None, None, None), {}, (), None
        raw = None
        if known.measured:
            raw = logits.clone() if len(known.measured) == len(items) else logits[known.measured_ids]
        before, errors = None, dict[int, str | None]()
        if known.constrained or known.penalties is not None:
            before = draws.check_logits(logits)
            rows = [(row, known.states[row].adjustments, _next_position(items[row])) for row in known.constrained]
            errors = constrain(logits, rows, self.keep)
            if known.penalties is not None:
                self._penalize(logits, items, known.states, known.penalties)
        if not known.parameters.draws:
            positions = None
        elif positions is None:
            positions = whole_numbers(list(map(_next_position, items)), self._device)
        found = draws.draw_tokens(logits, known.parameters, positions, before)
        measures = None if raw is None else self._measure(raw, found[0], known)
        return found, errors, known.measured, measures

    def _rows(self, items: Sequence[ScheduledSequence], vocab_size: int) -> KnownRows:
        """Return the sampling parameters of the items' rows."""
        own, last = items.seq_ids if isinstance(items, DecodeItems) else None, self._last
        if last is not None and own is last[0]:
            return last[1]
        seq_ids = tuple(map(SEQ_ID, items)) if own is None else tuple(own)
        known = self._known.get(seq_ids)
        if known is None:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            known = know_rows([self.states[seq_id] for seq_id in seq_ids], vocab_size, self._device)
            self._known[seq_ids] = known
        self._last = None if own is None else (own, known)
        return known

    def _results(self, drawn: DrawnRows) -> Sequence[ItemResult]:
        """Read the tokens of rows, and return the results of their items."""
        return self._follow(drawn.items, _row_results(drawn), drawn)

    def _follow(
        self, items: Sequence[ScheduledSequence], results: Sequence[ItemResult], drawn: DrawnRows
    ) -> Sequence[ItemResult]:
        """Advance grammars by the tokens of items, and append the tokens that they force."""
        if self._grammar_states is None or not drawn.errors:  # no row has a grammar
            return results
        return self._grammar_states.append(items, results)

    def _penalize(
        self,
        logits: Tensor,
        items: Sequence[ScheduledSequence],
        states: Sequence[SamplingState],
        known: KnownPenalties,
    ) -> None:
        """Apply penalties."""
        counted = []
        for row in known.rows:
            own = states[row].adjustments
            assert own.history is not None, "penalties have a history"
            counted.append(CountedRow(items[row], own.history, own.num_prompt))
        slots = self._counts.sync(counted, logits.shape[1], self._put_drawn)
        self._counts.penalize(logits, RowPenalties(known.row_ids, slots, *known.factors.unbind(1)))

    def _put_drawn(self, token_ids: Tensor, items: Sequence[ScheduledSequence]) -> None:
        """Replace placeholders, in int64 [n], by the tokens that they stand for: in place, and the host does not wait.

        The host has read all tokens when a step of this sampler begins, so there are no placeholders here.
        """

    def _measure(self, raw: Tensor, chosen: Tensor, known: KnownRows) -> Tensor:
        """Return the input of `_token_logprobs`, float64 [n, 3 + 2 * most], from the model's raw logits [n, V]."""
        ids = chosen[known.measured_ids][:, None]
        normed = raw.log_softmax(-1)
        above = torch.count_nonzero(raw > raw.gather(1, ids), dim=-1)[:, None]
        columns = [ids.double(), above.double() + 1.0, normed.gather(1, ids).clamp_(min=LOWEST).double()]
        most = max(count for _, count in known.measured)
        if most:
            top_ids = topk_in_order(raw, most)[1]
            columns += [top_ids.double(), normed.gather(1, top_ids).clamp_(min=LOWEST).double()]
        return torch.cat(columns, 1)


def _row_results(drawn: DrawnRows) -> Sequence[ItemResult]:
    """Read the tokens of rows, and return the result of each."""
    items, errors = drawn.items, drawn.errors
    token_ids, status = drawn.found.tolist()
    if drawn.measures is None and not errors and not any(status):
        if isinstance(items, DecodeItems):
            return DecodeResults(items.seq_ids, token_ids)
        return plain_results(map(SEQ_ID, items), zip(token_ids, strict=True))
    measures = {} if drawn.measures is None else _token_logprobs(drawn.measured, drawn.measures.tolist())
    rows = []
    for row, (token_id, what) in enumerate(zip(token_ids, status, strict=True)):
        error = errors.get(row) or (None, NO_TOKEN, BAD_LOGITS)[what]
        if error is not None:
            rows.append(SampledRow(error=error))
            continue
        rows.append(SampledRow((token_id,), (measures[row],) if row in measures else ()))
    return [one.result_of(item) for item, one in zip(items, rows, strict=True)]


def _next_position(item: ScheduledSequence) -> int:
    return item.start + len(item.token_ids)


def _token_logprobs(
    measured: Sequence[tuple[int, int]], numbers: Sequence[Sequence[float]]
) -> dict[int, TokenLogprobs]:
    """Return the log probabilities of some rows' tokens."""
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


def warm_up(draws: DrawsTokens, vocab_size: int, device: torch.device) -> None:
    """Sample in all ways, so that a backend compiles its kernels now, and not when a request needs them."""
    logits, positions = torch.zeros(4, vocab_size, device=device), whole_numbers(range(4), device)
    states = [
        SamplingState(NewSequence(SamplingParams(**options), 0, 0, 1, (0,), ()), device)
        for options in ({}, {"top_k": 1}, {"top_p": 0.9}, {"top_k": NARROW + 1})
    ]
    before = draws.check_logits(logits)
    for own in (states, [*states[:3], states[0]]):
        parameters = know_rows(own, vocab_size, device).parameters
        for each in (None, before):
            draws.draw_tokens(logits, None, None, each)
            draws.draw_tokens(logits, parameters, positions, each)
