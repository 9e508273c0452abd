"""Parameters of a step's rows that depend on sequences alone: looked up again only when the sequences change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.execution.pinned import placed
from quire.execution.sampling.row_sampling import SamplingState
from quire.ops.token_draws import FEW, GREEDY, MANY, NARROW, WHOLE, RowFilters, RowParameters


class KnownPenalties(NamedTuple):
    """The rows with penalties.

    Args:
        rows: the rows.
        row_ids: the same on the device, int64 [n].
        factors: repetition, frequency and presence penalties, float32 [n, 3] on the device.
    """

    rows: tuple[int, ...]
    row_ids: Tensor
    factors: Tensor


class KnownRows(NamedTuple):
    """The rows of a step, by their sequences.

    Args:
        states: sampling states of the sequences.
        parameters: their parameters; None where all take the likeliest token and ask for nothing else.
        constrained: rows with grammars.
        penalties: rows with penalties; None for none.
        measured: rows with log probabilities, each with its number of likeliest tokens.
        measured_ids: those rows on the device, int64 [n]; None for none.
    """

    states: Sequence[SamplingState]
    parameters: RowParameters | None
    constrained: tuple[int, ...]
    penalties: KnownPenalties | None
    measured: tuple[tuple[int, int], ...]
    measured_ids: Tensor | None


def know_rows(states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> KnownRows:
    """Return what rows ask for.

    Args:
        states: sampling states of the rows' sequences.
        vocab_size: V.
        device: device of the logits.
    """
    if all(state.is_plain for state in states):
        return KnownRows(states, None, (), None, (), None)
    constrained = tuple(row for row, state in enumerate(states) if state.adjustments.grammar_state is not None)
    measured = tuple(
        (row, state.params.logprobs or 0) for row, state in enumerate(states) if state.params.measures_tokens
    )
    measured_ids = whole_numbers([row for row, _ in measured], device) if measured else None
    penalties = _penalties(states, device)
    return KnownRows(states, _parameters(states, vocab_size, device), constrained, penalties, measured, measured_ids)


def whole_numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers as int64 on a device; the host does not wait."""
    return placed(torch.tensor(values, dtype=torch.int64), device)


def _penalties(states: Sequence[SamplingState], device: torch.device) -> KnownPenalties | None:
    rows = tuple(row for row, state in enumerate(states) if state.params.penalizes_tokens)
    if not rows:
        return None
    given = [states[row].params for row in rows]
    factors = torch.tensor([(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in given])
    return KnownPenalties(rows, whole_numbers(rows, device), placed(factors, device))


def _parameters(states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> RowParameters:
    """Return the parameters of rows."""
    kinds = [_kind(state) for state in states]
    floats, wholes = [], []
    most_few, cuts_many = 0, False
    for state, kind in zip(states, kinds, strict=True):
        own = state.filter
        floats.append((own.temperature, own.top_p, own.min_p))
        seed = state.seed & ((1 << 64) - 1)
        most = min(own.top_k or vocab_size, vocab_size)
        wholes.append((most, seed - (1 << 64) if seed >> 63 else seed, state.sample_idx))
        most_few = max(most_few, most) if kind == FEW else most_few
        cuts_many |= kind == MANY and most < vocab_size
    # In rows, each of which kernels read as a vector.
    temperature, top_p, min_p = placed(torch.tensor(floats, dtype=torch.float64).view(-1, 3).T.contiguous(), device)
    top_k, seeds, sample_idxs = placed(torch.tensor(wholes, dtype=torch.int64).view(-1, 3).T.contiguous(), device)
    temperature = temperature.float().clamp_(min=torch.finfo(torch.float32).tiny)
    greedy, whole, few, many = (
        whole_numbers(rows, device) if (rows := [row for row, own in enumerate(kinds) if own == kind]) else None
        for kind in (GREEDY, WHOLE, FEW, MANY)
    )
    filters = RowFilters(temperature, top_k, top_p, min_p.float())
    on_device = placed(torch.tensor(kinds, dtype=torch.int32), device)
    return RowParameters(on_device, greedy, whole, few, many, filters, seeds, sample_idxs, most_few, cuts_many)


def _kind(state: SamplingState) -> int:
    """Return how a row's token is chosen."""
    if state.params.is_greedy:
        return GREEDY
    own = state.filter
    return WHOLE if own.keeps_all else FEW if 0 < own.top_k <= NARROW else MANY
