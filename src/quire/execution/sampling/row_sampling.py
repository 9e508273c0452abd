"""Sampling of tokens from rows of logits; the tokens of a row do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from math import inf, isfinite
from struct import Struct
from typing import Final, NamedTuple

import torch

from quire.errors import NO_TOKEN
from quire.execution.sampling.logits_processing import KeepTokens, LogitsProcessing, adjust
from quire.execution.sampling.logprobs import measure, rows_per_tile
from quire.execution.sampling.sampling import Filter, draw, uniform
from quire.ops.interface.token_draws import FEW, GREEDY, MANY, NARROW, WHOLE
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, TokenLogprobs
from quire.text.structured.mask_filler import MaskedOutput

BAD_LOGITS = "the model gave logits that are not finite numbers"


# Parameters of a sequence packed as bytes, so that one call joins the parameters of many rows. `top_k`, or the
# greatest int64 for none; the seed in two's complement; the index of the sample in its request; and `top_p`:
WIDE_PARAMETERS: Final = Struct("=qqqd")
# Temperature, `min_p`, and the kind of rows:
NARROW_PARAMETERS: Final = Struct("=ffi")
NO_TOP_K: Final = (1 << 63) - 1
COLDEST: Final = torch.finfo(torch.float32).tiny


class SequenceParameters(NamedTuple):
    """The sampling parameters of a sequence, as the rows of a batch need them: the same in all steps.

    Args:
        is_plain: greedy, without any other option.
        has_more: it has a grammar, penalties or log probabilities.
        kind: kind of its rows; see `RowParameters`.
        wide, narrow: parameters packed as `WIDE_PARAMETERS` and `NARROW_PARAMETERS`.
    """

    is_plain: bool
    has_more: bool
    kind: int
    wide: bytes
    narrow: bytes


class SamplingState:
    """The sampling state of one sequence, from its first plan until it is finished."""

    def __init__(
        self, new_sequence: NewSequence, device: torch.device, grammar_state: MaskedOutput | None = None
    ) -> None:
        params = new_sequence.params
        self.params = params
        self.seed = new_sequence.seed
        self.sample_idx = new_sequence.sample_idx
        self.prompt_ids = (
            new_sequence.token_ids[: new_sequence.num_prompt] if params.prompt_logprobs is not None else ()
        )
        # None if its logits are never changed.
        self.adjustments: LogitsProcessing | None = None
        if grammar_state is not None or params.adjusts_logits or params.min_tokens:
            self.adjustments = LogitsProcessing(new_sequence, device, grammar_state)
        self.has_grammar = grammar_state is not None
        # Whether the processing of a row's logits depends on the tokens before it, including drafts.
        self.looks_back = params.needs_history
        # Whether sampling is greedy, without any other option.
        self.is_plain = params.is_greedy and self.adjustments is None and not params.measures_tokens

    @cached_property
    def filter(self) -> Filter:
        """The filters of its rows, unless it is greedy."""
        return Filter.of(self.params)

    @cached_property
    def parameters(self) -> SequenceParameters:
        """Its parameters in a batch."""
        params, own = self.params, self.filter
        has_more = params.measures_tokens or params.penalizes_tokens or self.has_grammar
        kind = GREEDY
        if not params.is_greedy:
            kind = WHOLE if own.keeps_all else FEW if 0 < own.top_k <= NARROW else MANY
        seed = self.seed & ((1 << 64) - 1)
        seed = seed - (1 << 64) if seed >> 63 else seed
        wide = WIDE_PARAMETERS.pack(own.top_k or NO_TOP_K, seed, self.sample_idx, own.top_p)
        narrow = NARROW_PARAMETERS.pack(max(own.temperature, COLDEST), own.min_p, kind)
        return SequenceParameters(self.is_plain, has_more, kind, wide, narrow)


class Row(NamedTuple):
    """A row of logits: its sequence's state, the position of the sampled token, and the number of samples."""

    state: SamplingState
    position: int
    num_samples: int


class SampledRow(NamedTuple):
    """The result of a row: tokens, and log probabilities if they are measured; or only an error."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None

    def result_of(self, item: ScheduledSequence) -> ItemResult:
        """Return the result of an item; an error is the request's own fault, except bad logits of the model."""
        is_own_fault = self.error not in (None, BAD_LOGITS)
        return ItemResult(item.seq_id, self.token_ids, self.logprobs, error=self.error, is_own_fault=is_own_fault)


def sample_rows(logits: torch.Tensor, rows: Sequence[Row], keep: KeepTokens) -> list[SampledRow]:
    """Sample the tokens of each row of logits, float32 [R, V], overwritten; no row's tokens depend on other rows."""
    changes = [
        (row_idx, row.state.adjustments, row.position)
        for row_idx, row in enumerate(rows)
        if row.state.adjustments is not None and not row.state.adjustments.is_none(row.position)
    ]
    measured = [row_idx for row_idx, row in enumerate(rows) if row.state.params.measures_tokens]
    errors: dict[int, str] = {}
    if not all(adjustments.shows_bad_logits for _, adjustments, _ in changes):
        errors = refuse(logits, logits.amax(-1, keepdim=True), BAD_LOGITS)
    raw = logits[measured] if measured else logits
    if changes:
        errors = adjust(logits, changes, keep) | errors
    nothing_left = NO_TOKEN if changes else BAD_LOGITS
    if all(row.state.params.is_greedy for row in rows):
        greatest, chosen = logits.max(-1, keepdim=True)
        errors = refuse(logits, greatest, nothing_left) | errors
    else:
        errors = refuse(logits, logits.amax(-1, keepdim=True), nothing_left) | errors
        chosen = _choose(logits, rows, is_sparse=bool(changes))
    token_ids = [
        tuple(ids * row.num_samples)[: row.num_samples] for row, ids in zip(rows, chosen.tolist(), strict=True)
    ]
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    if measured:
        counts = [rows[row_idx].state.params.logprobs or 0 for row_idx in measured]
        measures = _measure_drawn(raw, [token_ids[row_idx] for row_idx in measured], counts)
        logprobs = dict(zip(measured, measures, strict=True))
    return [
        SampledRow(error=errors[row_idx]) if row_idx in errors else SampledRow(ids, logprobs.get(row_idx, ()))
        for row_idx, ids in enumerate(token_ids)
    ]


def refuse(logits: torch.Tensor, greatest: torch.Tensor, error: str) -> dict[int, str]:
    """Return an error for each row whose greatest logit [R, 1] is not finite, and zero its logits."""
    refused = {row: value for row, (value,) in enumerate(greatest.tolist()) if not isfinite(value)}
    for row in refused:
        logits[row].zero_()
    return {row: error if value == -inf else BAD_LOGITS for row, value in refused.items()}


def _choose(logits: torch.Tensor, rows: Sequence[Row], *, is_sparse: bool) -> torch.Tensor:
    """Return `num_samples` tokens of each row, int64 [R, n], where n is the maximum of the rows' `num_samples`."""
    num_draws = max(row.num_samples for row in rows)
    drawing = [row_idx for row_idx, row in enumerate(rows) if not row.state.params.is_greedy]
    filters = [rows[row_idx].state.filter for row_idx in drawing]
    points = torch.zeros((len(drawing), num_draws), dtype=torch.float64)
    for idx, row_idx in enumerate(drawing):
        state, position, num_samples = rows[row_idx]
        numbers = [uniform(state.seed, state.sample_idx + draw_idx, position) for draw_idx in range(num_samples)]
        points[idx, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    points = points.to(logits.device)
    if len(drawing) == len(rows):
        return draw(logits, filters, points, is_sparse=is_sparse)
    chosen = logits.argmax(-1, keepdim=True).repeat(1, num_draws)
    if drawing:
        chosen[drawing] = draw(logits[drawing], filters, points, is_sparse=is_sparse)
    return chosen


def _measure_drawn(
    raw: torch.Tensor, token_ids: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[tuple[TokenLogprobs, ...]]:
    """Return log probabilities of tokens that were sampled from `raw`, float32 [R, V], in tiles of bounded size."""
    rows = [row for row, ids in enumerate(token_ids) for _ in ids]
    flat = [token_id for ids in token_ids for token_id in ids]
    measures: list[TokenLogprobs] = []
    tile = rows_per_tile(raw.shape[1])
    for start in range(0, len(rows), tile):
        part = slice(start, start + tile)
        measures += measure(raw[rows[part]], flat[part], [counts[row] for row in rows[part]])
    remaining = iter(measures)
    return [tuple(islice(remaining, len(ids))) for ids in token_ids]
