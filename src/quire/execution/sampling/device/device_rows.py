"""Rows that are drawn on the device of their logits: the host does not wait, and reads the tokens once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.sampling.device.device_counts import CountedRow, DeviceCounts, RowPenalties
from quire.execution.sampling.device.device_draws import topk_in_order
from quire.execution.sampling.device.known_rows import KnownPenalties, KnownRows, know_rows, whole_numbers
from quire.execution.sampling.logits_processing import KeepTokens, constrain
from quire.execution.sampling.logprobs import LOWEST
from quire.execution.sampling.row_sampling import SamplingState
from quire.execution.step.pinned import HostCopy
from quire.ops.interface.token_draws import NARROW, DrawsTokens
from quire.scheduling.decode_columns import DecodeItems
from quire.scheduling.plan import NewSequence, ScheduledSequence
from quire.sequences.params import SamplingParams

# Getters for `map`, without a Python call per item.
SEQ_ID: Final = attrgetter("seq_id")
# Maximum number of cached sets of rows: all items of a step, and the items that are drawn on the device.
_MOST_KNOWN: Final = 4


class DrawnRows(NamedTuple):
    """Rows that are sampled on the device, with all inputs of their results.

    Args:
        items: items of the rows.
        found: tokens and states of the rows, [2, R]; see `DrawsTokens`.
        errors: error of each row with a grammar, by row; None if it did not fail.
        measured: rows with log probabilities, each with its number of top tokens.
        measures: their log probabilities, see `DeviceRows._measure`; None without such rows.
    """

    items: Sequence[ScheduledSequence]
    found: Tensor | HostCopy
    errors: dict[int, str | None]
    measured: Sequence[tuple[int, int]] = ()
    measures: Tensor | HostCopy | None = None


class DeviceRows:
    """Samples rows on the device: the same tokens as on the host.

    Args:
        states: sampling states of the open sequences, by sequence id.
        device: device of the logits.
        keep: applies the masks of grammars.
        draws: the backend's sampling kernels, or torch's operators.
        deferred: tokens that are not read yet; None if the host has read all tokens when a step begins.
    """

    def __init__(
        self,
        states: Mapping[int, SamplingState],
        device: torch.device,
        keep: KeepTokens,
        draws: DrawsTokens,
        deferred: DeferredTokens | None = None,
    ) -> None:
        self._states, self._device, self._keep, self._draws = states, device, keep, draws
        self._deferred = deferred
        self._counts = DeviceCounts(device)
        # Parameters of rows, by their sequence ids: usually the next step has the same sequences.
        self._known: dict[tuple[int, ...], KnownRows] = {}
        # The `seq_ids` list of the last `DecodeItems`, and the parameters of its rows.
        self._last: tuple[list[int], KnownRows] | None = None

    def close(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._known.clear()
        self._last = None
        self._counts.close(seq_id)

    def draw(self, logits: Tensor, items: Sequence[ScheduledSequence], positions: Tensor | None = None) -> DrawnRows:
        """Draw a token for each row; the host does not wait.

        Args:
            logits: float32 [R, V], overwritten.
            items: items of the rows, each with one sample and no draft.
            positions: position of the token of each row, int64 [R] on the device; None copies them there.
        """
        known, draws = self._rows(items, logits.shape[1]), self._draws
        if known.parameters is None:
            return DrawnRows(items, draws.draw_tokens(logits, None, None, None), {})
        raw = None
        if known.measured:
            raw = logits.clone() if len(known.measured) == len(items) else logits[known.measured_ids]
        before, errors = None, dict[int, str | None]()
        if known.constrained or known.penalties is not None:
            before = draws.check_logits(logits)
            rows = [
                (row, adjustments, next_position(items[row]))
                for row in known.constrained
                if (adjustments := known.states[row].adjustments) is not None
            ]
            errors = constrain(logits, rows, self._keep)
            if known.penalties is not None:
                self._penalize(logits, items, known.states, known.penalties)
        if not known.parameters.draws:
            positions = None
        elif positions is None:
            positions = whole_numbers(list(map(next_position, items)), self._device)
        found = draws.draw_tokens(logits, known.parameters, positions, before)
        measures = None if raw is None else self._measure(raw, found[0], known)
        return DrawnRows(items, found, errors, known.measured, measures)

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
            known = know_rows([self._states[seq_id] for seq_id in seq_ids], vocab_size, self._device)
            self._known[seq_ids] = known
        self._last = None if own is None else (own, known)
        return known

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
            assert own is not None, "penalties are a logits processing"
            assert own.history is not None, "penalties have a history"
            counted.append(CountedRow(items[row], own.history, own.num_prompt))
        slots = self._counts.sync(counted, logits.shape[1], self._put_drawn)
        self._counts.penalize(logits, RowPenalties(known.row_ids, slots, *known.factors.unbind(1)))

    def _put_drawn(self, token_ids: Tensor, items: Sequence[ScheduledSequence]) -> None:
        """Replace placeholders, in int64 [n], by the tokens that they stand for; the host does not wait."""
        if self._deferred is not None:
            self._deferred.put(token_ids, items, range(len(items)))

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


def next_position(item: ScheduledSequence) -> int:
    """Return the position of the token that an item without drafts samples."""
    return item.start + len(item.token_ids)


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
