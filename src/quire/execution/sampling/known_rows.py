"""Parameters of a step's rows that depend on sequences alone: looked up again only when the sequences change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.execution.pinned import placed
from quire.execution.sampling.row_sampling import SamplingState
from quire.ops.token_draws import FEW, GREEDY, MANY, WHOLE, RowFilters, RowParameters


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
    plain, has_more, *columns = zip(*[state.parameters for state in states], strict=True)
    if all(plain):
        return KnownRows(states, None, (), None, (), None)
    parameters = _parameters(columns, vocab_size, device)
    if not any(has_more):
        return KnownRows(states, parameters, (), None, (), None)
    constrained = tuple(row for row, state in enumerate(states) if state.adjustments.grammar_state is not None)
    measured = tuple(
        (row, state.params.logprobs or 0) for row, state in enumerate(states) if state.params.measures_tokens
    )
    measured_ids = whole_numbers([row for row, _ in measured], device) if measured else None
    return KnownRows(states, parameters, constrained, _penalties(states, device), measured, measured_ids)


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


def _parameters(columns: Sequence[tuple[Any, ...]], vocab_size: int, device: torch.device) -> RowParameters:
    """Return the parameters of rows, from the columns of their `SequenceParameters` from `kind` on."""
    kinds, temperatures, top_ps, min_ps, top_ks, seeds, sample_idxs = columns
    num_rows, most = len(kinds), [min(top_k or vocab_size, vocab_size) for top_k in top_ks]
    # In rows, each of which kernels read as a vector.
    floats = torch.tensor(temperatures + top_ps + min_ps, dtype=torch.float64).view(3, num_rows)
    temperature, top_p, min_p = placed(floats, device)
    wholes = torch.tensor([*most, *seeds, *sample_idxs], dtype=torch.int64).view(3, num_rows)
    top_k, seed, sample_idx = placed(wholes, device)
    temperature = temperature.float().clamp_(min=torch.finfo(torch.float32).tiny)
    greedy, whole, few, many = (_rows_of(kind, kinds, device) for kind in (GREEDY, WHOLE, FEW, MANY))
    most_few = 0 if few is None else max(count for count, kind in zip(most, kinds, strict=True) if kind == FEW)
    cuts_many = many is not None and any(
        kind == MANY and count < vocab_size for count, kind in zip(most, kinds, strict=True)
    )
    filters = RowFilters(temperature, top_k, top_p, min_p.float())
    on_device = placed(torch.tensor(kinds, dtype=torch.int32), device)
    return RowParameters(on_device, greedy, whole, few, many, filters, seed, sample_idx, most_few, cuts_many)


def _rows_of(kind: int, kinds: Sequence[int], device: torch.device) -> Tensor | None:
    """Return the rows of one kind; None where there are none."""
    if kind not in kinds:
        return None
    return whole_numbers([row for row, each in enumerate(kinds) if each == kind], device)
