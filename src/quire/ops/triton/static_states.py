"""Recurrence of decodes whose sequences, blocks and flags are in static buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops.interface.ops import PagedStates
from quire.ops.interface.static_steps import StaticLimits, StaticMemory, StaticStateBatch
from quire.ops.triton.step_states import ANY_ROWS, TritonStepStates


class TritonStaticStates:
    """Decodes over one cache group of states; see `StaticStates`."""

    def __init__(self, memory: StaticMemory, limits: StaticLimits) -> None:
        num_rows = limits.num_rows
        self._block_ids = memory.take(num_rows, torch.int32)
        self._has_state = memory.take(num_rows, torch.int32)
        self._row_starts = memory.take(num_rows + 1, torch.int32)
        # The sequence of each row.
        self._owners = memory.take(num_rows, torch.int32)
        self._one_each = torch.arange(num_rows + 1, dtype=torch.int32)
        self._has_one_each = False

    def batch(self, num_rows: int) -> StaticStateBatch:
        """Return the batch of a step of `num_rows` rows."""
        return StaticStateBatch((), range(num_rows + 1), (), self)

    def write_states(
        self, block_ids: Sequence[int], has_state: Sequence[bool], num_rows: int, counts: Sequence[int] | None = None
    ) -> None:
        """Write a step, padded to as many sequences as rows; some padding sequences may have no row."""
        num_real = len(block_ids)
        if counts is not None:
            of_all = torch.zeros(num_rows, dtype=torch.int64)
            of_all[:num_real] = torch.tensor(counts)
            of_all[num_real : num_real + num_rows - sum(counts)] = 1
            torch.cumsum(of_all, 0, dtype=torch.int32, out=self._row_starts.host[1 : num_rows + 1])
            self._owners.host[:num_rows] = torch.repeat_interleave(of_all)
            self._has_one_each = False
        elif not self._has_one_each:
            self._row_starts.host.copy_(self._one_each)
            self._owners.host.copy_(self._one_each[:-1])
            self._has_one_each = True
        for numbers, values in ((self._block_ids, block_ids), (self._has_state, has_state)):
            numbers.host[:num_real] = torch.tensor(values, dtype=torch.int32)
            numbers.host[num_real:num_rows] = 0

    def put_into(self, step: TritonStaticStepStates, num_rows: int) -> None:
        """Make a step read the buffers."""
        step.put_numbers(
            self._row_starts.device[: num_rows + 1],
            self._block_ids.device[:num_rows],
            self._has_state.device[:num_rows],
            self._owners.device[:num_rows],
        )


class TritonStaticStepStates(TritonStepStates):
    """Recurrence of decodes over one cache group."""

    def __init__(self, batch: StaticStateBatch, states: PagedStates) -> None:
        assert isinstance(batch.source, TritonStaticStates), "a batch of another backend"
        self._states = states
        self._num_seqs = self._num_rows = batch.row_starts[-1]
        self._single_rows = ANY_ROWS
        batch.source.put_into(self, self._num_rows)
