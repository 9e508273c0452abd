"""The sampler: from a step's logits to its tokens, for the whole batch at once.

Tokens are drawn on the device of the logits. The host waits for it once per step, for the tokens and their log
probabilities, or with asynchronous scheduling once the next step has been launched. Rows with options that only the
host implements are drawn by the host: filters of whole distributions, bias, allowed and suppressed tokens, bad words,
DRY, logits processors, several samples at once, and drafts whose rows depend on the tokens before them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, islice, repeat
from math import isfinite
from operator import attrgetter
from typing import Final, cast

import torch

from quire.errors import NO_TOKEN
from quire.execution.capture.decode_rows import drawn_rows_of
from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.sampling.device.device_rows import SEQ_ID, DeviceRows, DrawnRows, next_position
from quire.execution.sampling.logits_processing import KeepTokens
from quire.execution.sampling.row_sampling import BAD_LOGITS, Row, SampledRow, SamplingState, sample_rows
from quire.execution.sampling.token_history import TokenHistory
from quire.execution.sampling.verification import run_of, run_result, verify
from quire.execution.step.pinned import HostCopy
from quire.ops.interface.token_draws import BROKEN, FINE, DrawsTokens
from quire.ops.pytorch.torch_rows import apply_token_bitmask
from quire.scheduling.decode_columns import DecodeItems, DecodeResults, seq_ids_of
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, StepPlan, TokenLogprobs
from quire.sequences.decoding.drafting import UNKNOWN
from quire.text.structured.mask_filler import GrammarStates

_NUM_SAMPLES: Final = attrgetter("num_samples")


class Sampler:
    """Samples tokens, and keeps the sampling state of each open sequence.

    Args:
        device: device of the logits.
        grammar_states: grammar states of constrained outputs; None if no request can be constrained.
        keep: applies the masks of grammars.
        draws: draws tokens on the device; None if the host draws all of them.
        deferred: keeps the tokens that are drawn on the device, whose results are empty when `sample` returns; None to
            read them at once.
        is_follower: True if another rank draws the tokens. The parameters of open sequences are kept, so that all ranks
            read the same rows; accepted drafts are known here only from the next plan.

    Attributes:
        states: sampling states of the open sequences.
        keep: see the argument.
    """

    def __init__(
        self,
        device: torch.device,
        grammar_states: GrammarStates | None = None,
        keep: KeepTokens = apply_token_bitmask,
        draws: DrawsTokens | None = None,
        deferred: DeferredTokens | None = None,
        *,
        is_follower: bool = False,
    ) -> None:
        self._device = device
        self._grammar_states = grammar_states
        self.keep = keep
        self.states: dict[int, SamplingState] = {}
        # Open sequences that are not plain greedy; that have a token history; that have prompt log probabilities.
        self._special: dict[int, SamplingState] = {}
        self._with_history: dict[int, TokenHistory] = {}
        self._with_prompt: dict[int, SamplingState] = {}
        # Open sequences whose rows the host draws, always or at some positions.
        self._on_host: dict[int, SamplingState] = {}
        self._rows = None if draws is None else DeviceRows(self.states, device, keep, draws, deferred)
        self._deferred, self._is_follower = deferred, is_follower
        # Empty results of the last step's rows, with their sequence ids: usually the next step has the same.
        self._empty: tuple[list[int], list[ItemResult]] = [], []
        # True while sequences with a grammar are open, and for one more step, which closes the last ones.
        self._has_grammars = False

    @property
    def num_open(self) -> int:
        """Number of open sequences."""
        return len(self.states)

    def begin_step(self, plan: StepPlan) -> None:
        """Drop the finished sequences, add the new ones, and sync histories and grammars to this step's tokens."""
        for seq_id in plan.finished_ids:
            self._close(seq_id)
        if not isinstance(plan.items, DecodeItems):
            for item in plan.items:
                if item.new_sequence is not None:
                    self._open(item.seq_id, item.new_sequence)
        self.begin(plan.items)

    def begin(self, items: Sequence[ScheduledSequence]) -> None:
        """Sync histories and grammar states to the tokens before the sampled ones."""
        if self._with_history and not isinstance(items, DecodeItems):
            for item in items:
                history = self._with_history.get(item.seq_id)
                # The token of a placeholder is added to the history when it is read.
                if history is not None and item.token_ids[0] != UNKNOWN:
                    # Drafts are added one by one, as they are accepted.
                    certain = item.token_ids[: len(item.token_ids) - item.num_draft]
                    history.sync(item.start, certain, is_end=item.num_samples > 0)
        if self._grammar_states is not None and self._has_grammars:
            self._grammar_states.begin(items)
            self._has_grammars = self._grammar_states.num_open > 0

    def masks_drafts(self, items: Iterable[ScheduledSequence]) -> bool:
        """Return whether a grammar may mask rows of drafts: then the drafts must be known when the step begins."""
        opened = (item.new_sequence for item in items if item.num_draft)
        return self._has_grammars or any(each is not None and each.params.is_constrained for each in opened)

    def _close(self, seq_id: int) -> None:
        if self._grammar_states is not None and self._has_grammars:
            self._grammar_states.close(seq_id)
        for known in (self.states, self._special, self._with_history, self._with_prompt, self._on_host):
            known.pop(seq_id, None)
        if self._rows is not None:
            self._rows.close(seq_id)

    def _open(self, seq_id: int, new_sequence: NewSequence) -> None:
        self._close(seq_id)  # an opening replaces all that was known
        grammar_state = None
        if self._grammar_states is not None and new_sequence.params.is_constrained:
            grammar_state, self._has_grammars = self._grammar_states.open(seq_id, new_sequence), True
        state = self.states[seq_id] = SamplingState(new_sequence, self._device, grammar_state)
        adjustments = state.adjustments
        if adjustments is not None and adjustments.history is not None and not self._is_follower:
            self._with_history[seq_id] = adjustments.history
        if state.prompt_ids:
            self._with_prompt[seq_id] = state
        if not state.is_plain:
            self._special[seq_id] = state
        if state.params.needs_host or (adjustments is not None and adjustments.suppressed_until):
            self._on_host[seq_id] = state

    def sample(
        self,
        logits: torch.Tensor,
        items: Sequence[ScheduledSequence],
        positions: torch.Tensor | None = None,
    ) -> list[ItemResult]:
        """Sample every item's tokens.

        A row whose logits are not finite is an error of its item alone, unless a draft before it is rejected.

        Args:
            logits: float32 [R, V], overwritten: the rows of each item's last token, and of the `num_draft` before it.
            items: items with `num_samples` of at least 1, in any order; no item's result depends on the others.
            positions: position of the token that each row samples, int64 [R] on the device; None copies them there.
        """
        if self._rows is None:
            return self._sample_on_host(logits, items)
        if len(logits) != len(items):
            rows = drawn_rows_of(items)
            looks_back = any(item.num_draft and self.states[item.seq_id].looks_back for item in items)
            if looks_back or not all(map(self._can_draw, rows)):
                return self._sample_on_host(logits, items)
            return self._take_runs(items, self._rows.draw(logits, rows, positions))
        if not self._on_host and (isinstance(items, DecodeItems) or max(map(_NUM_SAMPLES, items)) == 1):
            return self._take(self._rows.draw(logits, items, positions))
        on_device: list[int] = []
        on_host: list[int] = []
        for row, item in enumerate(items):
            (on_device if self._can_draw(item) else on_host).append(row)
        if not on_host:
            return self._take(self._rows.draw(logits, items, positions))
        host_results = self._sample_on_host(logits[on_host], [items[row] for row in on_host])
        results = dict(zip(on_host, host_results, strict=True))
        if on_device:
            drawn = self._rows.draw(logits[on_device], [items[row] for row in on_device])
            results |= dict(zip(on_device, self._take(drawn), strict=True))
        return [results[row] for row in range(len(items))]

    def _can_draw(self, item: ScheduledSequence) -> bool:
        """Return whether an item, without drafts, can be drawn on the device."""
        if item.num_samples != 1:
            return False
        state = self._on_host.get(item.seq_id)
        if state is None:
            return True
        adjustments = state.adjustments
        is_suppressing = adjustments is not None and adjustments.is_suppressing(next_position(item))
        return not (state.params.needs_host or is_suppressing)

    def _sample_on_host(self, logits: torch.Tensor, items: Sequence[ScheduledSequence]) -> list[ItemResult]:
        """Sample every item's tokens; see `sample`."""
        if self.is_greedy(items):
            results = self._read_likeliest(*logits.max(-1), items)
            if results is not None:
                return results
        states = [self.states[item.seq_id] for item in items]
        if len(logits) > len(items):
            results = verify(logits, items, states, self.keep)
        else:
            rows = [
                Row(state, item.start + len(item.token_ids), item.num_samples)
                for state, item in zip(states, items, strict=True)
            ]
            drawn = sample_rows(logits, rows, self.keep)
            results = [one.result_of(item) for item, one in zip(items, drawn, strict=True)]
        if self._grammar_states is None or not self._has_grammars:
            return results
        return self._grammar_states.append(items, results)

    def take_likeliest(
        self, greatest: torch.Tensor, chosen: torch.Tensor, items: Sequence[ScheduledSequence]
    ) -> list[ItemResult] | None:
        """Return the results of greedy sampling; None if some greatest logit is not finite and tokens are read at once.

        Args:
            greatest: greatest logits, [R] of float32.
            chosen: their tokens, [R] of int64.
            items: see `sample`; all are plain greedy.
        """
        if self._deferred is None:
            return self._read_likeliest(greatest, chosen, items)
        found = torch.stack((chosen, torch.where(greatest.isfinite(), FINE, BROKEN)))
        if len(chosen) == len(items):
            return self._take(DrawnRows(items, found, {}))
        return self._take_runs(items, DrawnRows(drawn_rows_of(items), found, {}))

    def _read_likeliest(
        self, greatest: torch.Tensor, chosen: torch.Tensor, items: Sequence[ScheduledSequence]
    ) -> list[ItemResult] | None:
        """See `take_likeliest`."""
        if not all(map(isfinite, greatest.tolist())):
            return None
        seq_ids, token_ids = [item.seq_id for item in items], chosen.tolist()
        if len(token_ids) == len(items):
            return plain_results(seq_ids, zip(token_ids, strict=True))
        ends = accumulate(1 + item.num_draft for item in items)
        return plain_results(
            seq_ids,
            [run_of(item, token_ids[end - 1 - item.num_draft : end]) for item, end in zip(items, ends, strict=True)],
        )

    def _take(self, drawn: DrawnRows) -> list[ItemResult]:
        """Return the results of rows that were drawn on the device; empty ones, if they are read later."""
        if self._deferred is None:
            return list(self._follow(drawn.items, row_results(drawn), drawn))
        items, token_ids = drawn.items, cast(torch.Tensor, drawn.found)[0]
        histories = [self._with_history.get(item.seq_id) for item in items] if self._with_history else ()
        seq_ids = seq_ids_of(items)
        self._deferred.add(seq_ids, token_ids, partial(self._read, _copied(drawn), histories))
        if seq_ids is not self._empty[0] and seq_ids != self._empty[0]:
            self._empty = seq_ids, plain_results(seq_ids, repeat(()))
        return self._empty[1].copy()

    def _read(self, drawn: DrawnRows, histories: Sequence[TokenHistory | None]) -> Sequence[ItemResult]:
        """Read the tokens of rows, add them to the histories of their sequences, and return the results of the items.

        The next step has begun meanwhile, and may have closed a sequence: then its history is unused.
        """
        results = self._follow(drawn.items, row_results(drawn), drawn)
        if not histories:
            return results
        for item, history, result in zip(drawn.items, histories, results, strict=False):
            if history is not None and result.token_ids:
                history.add_drawn(item.start + len(item.token_ids), result.token_ids[0])
        return results

    def _take_runs(self, items: Sequence[ScheduledSequence], drawn: DrawnRows) -> list[ItemResult]:
        """Return the results of items from the rows of their drafts and of the tokens before these; see `_take`."""
        if self._deferred is None:
            return self._read_runs(items, drawn)
        self._deferred.add_read(partial(self._read_runs, items, _copied(drawn)))
        return plain_results(seq_ids_of(items), repeat(()))

    def _read_runs(self, items: Sequence[ScheduledSequence], drawn: DrawnRows) -> list[ItemResult]:
        """Read rows, and return the results of their items."""
        of_rows = iter(row_results(drawn))
        runs = [run_result(item, list(islice(of_rows, 1 + item.num_draft))) for item in items]
        return list(self._follow(items, runs, drawn))

    def _follow(
        self, items: Sequence[ScheduledSequence], results: Sequence[ItemResult], drawn: DrawnRows
    ) -> Sequence[ItemResult]:
        """Advance grammars by the tokens of items, and append the tokens that they force."""
        if self._grammar_states is None or not drawn.errors:  # no row has a grammar
            return results
        return self._grammar_states.append(items, results)

    def is_greedy(self, items: Iterable[ScheduledSequence]) -> bool:
        """Return whether all items are sampled greedily, without any other option."""
        special = self._special
        return not any(item.num_samples > 1 or item.seq_id in special for item in items)

    def measures_prompts(self, items: Iterable[ScheduledSequence]) -> bool:
        """Return whether an item has prompt targets."""
        measured = self._with_prompt
        return bool(measured) and any(
            item.seq_id in measured and item.start + 1 < len(measured[item.seq_id].prompt_ids) for item in items
        )

    def prompt_targets(self, item: ScheduledSequence) -> tuple[tuple[int, ...], int]:
        """Return the prompt tokens that the item's first hidden states predict, if the request wants them measured.

        Returns:
            The prompt's tokens at `[start + 1, min(start + len + 1, num_prompt))`, or none; and the number of
            likeliest tokens to list with each.
        """
        state = self.states[item.seq_id]
        end = item.start + len(item.token_ids) + 1
        return state.prompt_ids[item.start + 1 : end], state.params.prompt_logprobs or 0


def plain_results(seq_ids: Iterable[int], token_ids: Iterable[tuple[int, ...]]) -> list[ItemResult]:
    """Return results that have tokens only, without a Python call for each."""
    fields = zip(seq_ids, token_ids, *map(repeat, ((), (), None, (), False, ())), strict=False)
    return list(map(tuple.__new__, repeat(ItemResult), fields))


def _copied(drawn: DrawnRows) -> DrawnRows:
    """Return rows whose values are on their way to the host."""
    found, measures = cast(torch.Tensor, drawn.found), cast(torch.Tensor | None, drawn.measures)
    return drawn._replace(found=HostCopy(found), measures=None if measures is None else HostCopy(measures))


def row_results(drawn: DrawnRows) -> Sequence[ItemResult]:
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


def _token_logprobs(
    measured: Sequence[tuple[int, int]], numbers: Sequence[Sequence[float]]
) -> dict[int, TokenLogprobs]:
    """Return the log probabilities of some rows' tokens.

    Args:
        measured: rows, each with its number of top tokens.
        numbers: token, rank and log probability of each row; then its top tokens, as many as the row with the most
            has, and their log probabilities.
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
