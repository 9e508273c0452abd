"""Sampling parameters of a step's rows, which depend on the sequences only: rebuilt only when these change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.execution.sampling.row_sampling import NARROW_PARAMETERS, WIDE_PARAMETERS, SamplingState
from quire.execution.step.pinned import placed
from quire.ops.interface.static_steps import ALIGNMENT, vector
from quire.ops.interface.token_draws import FEW, KINDS, MANY, RowFilters, RowParameters

# Numbers of 8-byte and 4-byte columns; column lengths are a multiple of `_COLUMN`.
_WIDE: Final = WIDE_PARAMETERS.size // 8
_NARROW: Final = NARROW_PARAMETERS.size // 4
_COLUMN: Final = ALIGNMENT // 4


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
        parameters: their parameters; None if all rows are plain greedy.
        constrained: rows with grammars.
        penalties: rows with penalties; None if there are none.
        measured: rows with log probabilities, each with its number of top tokens.
        measured_ids: the measured rows on the device, int64 [n]; None if there are none.
    """

    states: Sequence[SamplingState]
    parameters: RowParameters | None
    constrained: tuple[int, ...]
    penalties: KnownPenalties | None
    measured: tuple[tuple[int, int], ...]
    measured_ids: Tensor | None


def know_rows(states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> KnownRows:
    """Return the parameters of rows."""
    plain, has_more, kinds, wide, narrow = zip(*[state.parameters for state in states], strict=True)
    if all(plain):
        return KnownRows(states, None, (), None, (), None)
    parameters = _parameters(kinds, wide, narrow, vocab_size, device)
    if not any(has_more):
        return KnownRows(states, parameters, (), None, (), None)
    constrained = tuple(row for row, state in enumerate(states) if state.has_grammar)
    measured = tuple(
        (row, state.params.logprobs or 0) for row, state in enumerate(states) if state.params.measures_tokens
    )
    measured_ids = whole_numbers([row for row, _ in measured], device) if measured else None
    return KnownRows(states, parameters, constrained, _penalties(states, device), measured, measured_ids)


def whole_numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers as an int64 tensor on a device; the host does not wait."""
    return placed(vector(values), device)


def _penalties(states: Sequence[SamplingState], device: torch.device) -> KnownPenalties | None:
    rows = tuple(row for row, state in enumerate(states) if state.params.penalizes_tokens)
    if not rows:
        return None
    given = [states[row].params for row in rows]
    factors = torch.tensor([(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in given])
    return KnownPenalties(rows, whole_numbers(rows, device), placed(factors, device))


def _parameters(
    kinds: Sequence[int], wide: Sequence[bytes], narrow: Sequence[bytes], vocab_size: int, device: torch.device
) -> RowParameters:
    """Return the parameters of rows, from the kinds and packed bytes of their `SequenceParameters`."""
    # As columns (structure of arrays), each a vector aligned to `ALIGNMENT` bytes; one copy to the device.
    count, length = len(kinds), -(-len(kinds) // _COLUMN) * _COLUMN
    numbers = torch.empty((2 * _WIDE + _NARROW) * length, dtype=torch.int32)
    on_host = _columns(numbers, count, length)
    for columns, rows in zip(on_host, (wide, narrow), strict=True):
        columns.copy_(torch.frombuffer(bytearray(b"".join(rows)), dtype=columns.dtype).view(count, -1).t())
    top_k = on_host[0][0]
    top_k.clamp_(max=vocab_size)
    lists: list[Tensor | None] = [None] * len(KINDS)
    most_few, cuts_many = 0, False
    for kind in set(kinds):
        if kinds.count(kind) == count:
            lists[kind], own_top_k = torch.arange(count, device=device), top_k
        else:
            own = vector([row for row, each in enumerate(kinds) if each == kind])
            lists[kind], own_top_k = placed(own, device), top_k[own]
        most_few = int(own_top_k.max()) if kind == FEW else most_few
        cuts_many |= kind == MANY and int(own_top_k.min()) < vocab_size
    wide_columns, narrow_columns = _columns(placed(numbers, device), count, length)
    top_k, seeds, sample_idxs, top_p = wide_columns.unbind(0)
    temperature, min_p, row_kinds = narrow_columns.unbind(0)
    filters = RowFilters(temperature.view(torch.float32), top_k, top_p.view(torch.float64), min_p.view(torch.float32))
    greedy, whole, few, many = lists
    return RowParameters(row_kinds, greedy, whole, few, many, filters, seeds, sample_idxs, most_few, cuts_many)


def _columns(numbers: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return views of the columns in a buffer: wide ones, int64 [4, n], and narrow ones, int32 [3, n]."""
    end = 2 * _WIDE * length
    wide = numbers[:end].view(torch.int64).view(_WIDE, length)
    return wide[:, :count], numbers[end:].view(_NARROW, length)[:, :count]
