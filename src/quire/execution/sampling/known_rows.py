"""Parameters of a step's rows that depend on sequences alone: looked up again only when the sequences change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.execution.pinned import placed
from quire.execution.sampling.row_sampling import SamplingState
from quire.ops.static_steps import vector
from quire.ops.token_draws import KINDS, RowFilters, RowParameters


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
    plain, has_more, kinds, packed = zip(*[state.parameters for state in states], strict=True)
    if all(plain):
        return KnownRows(states, None, (), None, (), None)
    parameters = _parameters(kinds, packed, vocab_size, device)
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
    return placed(vector(values), device)


def _penalties(states: Sequence[SamplingState], device: torch.device) -> KnownPenalties | None:
    rows = tuple(row for row, state in enumerate(states) if state.params.penalizes_tokens)
    if not rows:
        return None
    given = [states[row].params for row in rows]
    factors = torch.tensor([(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in given])
    return KnownPenalties(rows, whole_numbers(rows, device), placed(factors, device))


def _parameters(kinds: Sequence[int], packed: Sequence[bytes], vocab_size: int, device: torch.device) -> RowParameters:
    """Return the parameters of rows, from the kinds and numbers of their `SequenceParameters`."""
    # In columns, each of which kernels read as a vector.
    numbers = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.int64).view(len(kinds), -1).t().contiguous()
    top_k, kind = numbers[0], numbers[1]
    top_k.masked_fill_(top_k == 0, vocab_size).clamp_(max=vocab_size)
    greedy, whole, few, many = ((kind == each).nonzero()[:, 0] if each in kinds else None for each in KINDS)
    most_few = 0 if few is None else int(top_k[few].max())
    cuts_many = many is not None and int(top_k[many].min()) < vocab_size
    greedy, whole, few, many = (None if each is None else placed(each, device) for each in (greedy, whole, few, many))
    columns = placed(numbers, device)
    top_k, kind, seed, sample_idx = columns[:4]
    temperature, top_p, min_p = columns[4:].view(torch.float64)
    temperature = temperature.float().clamp_(min=torch.finfo(torch.float32).tiny)
    filters = RowFilters(temperature, top_k, top_p, min_p.float())
    return RowParameters(kind.int(), greedy, whole, few, many, filters, seed, sample_idx, most_few, cuts_many)
