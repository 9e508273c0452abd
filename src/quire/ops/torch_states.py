"""Recurrence over paged states from stock operators."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface import PagedStates, ScanHeads, StateBatch

# Rows of a sequence that are scanned at once. Within them work grows with the square, between them it is sequential.
CHUNK_ROWS = 64


class TorchStepStates:
    """Recurrence of one step over one cache group.

    Convolutions run over all sequences in one go. States are large, so each is worked on in place, one sequence after
    the other: a single row by the recurrence itself, more rows in chunks.
    """

    def __init__(self, batch: StateBatch, states: PagedStates) -> None:
        self._batch = batch
        self._states = states
        device = states.inputs[0].device
        self._block_ids = torch.tensor(batch.block_ids, dtype=torch.int64, device=device)
        fresh = [idx for idx, has_state in enumerate(batch.has_state) if not has_state]
        self._fresh = torch.tensor(fresh, dtype=torch.int64, device=device) if fresh else None
        taps, kept = _input_rows(batch, states.inputs[0].shape[1])
        self._tap_rows, self._kept_rows = taps.to(device), kept.to(device)

    def convolve(self, layer_idx: int, x: Tensor, taps: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
        """Gather what each tap sees, multiply, add."""
        inputs = self._states.inputs[layer_idx]
        kept = inputs.index_select(0, self._block_ids)
        if self._fresh is not None:
            kept.index_fill_(0, self._fresh, 0.0)
        rows = torch.cat((kept.flatten(0, 1), x))
        inputs.index_copy_(0, self._block_ids, rows.index_select(0, self._kept_rows).view_as(kept))
        wide = rows.float()
        y = wide.index_select(0, self._tap_rows[0]).mul_(taps[0])
        for row_ids, tap in zip(self._tap_rows[1:], taps[1:], strict=True):
            y.addcmul_(wide.index_select(0, row_ids), tap)
        if bias is not None:
            y.add_(bias)
        if activation:
            y = functional.silu(y, inplace=True)
        return y.to(x.dtype)

    def scan(self, layer_idx: int, x: Tensor, write: Tensor, read: Tensor, steps: Tensor, heads: ScanHeads) -> Tensor:
        """Carry each state through its rows."""
        sums = self._states.sums[layer_idx]
        num_heads, head_dim, state_dim = sums.shape[1:]
        lengths = functional.softplus(steps.float() + heads.step_biases)
        decays = lengths * heads.decays
        values = x.float().view(-1, num_heads, head_dim)
        taken = values * lengths[:, :, None]
        writes, reads = (part.float().view(len(x), -1, state_dim) for part in (write, read))
        output = values * heads.skips[:, None]
        for state, rows in self._sequences(sums):
            scan_rows = scan_one if rows.stop - rows.start == 1 else scan_in_chunks
            output[rows] += scan_rows(state, taken[rows], writes[rows], reads[rows], decays[rows])
        return output.flatten(1)

    def correct(
        self, layer_idx: int, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
    ) -> Tensor:
        """Carry each state through its rows."""
        sums = self._states.sums[layer_idx]
        num_heads, key_dim, value_dim = sums.shape[1:]
        share = num_heads * key_dim // keys.shape[1]
        queries, keys = (
            part.view(len(part), -1, key_dim).repeat_interleave(share, 1).transpose(0, 1) for part in (queries, keys)
        )
        wanted = values.float().view(-1, num_heads, value_dim).transpose(0, 1)
        output = values.new_empty(len(values), num_heads, value_dim, dtype=torch.float32)
        for state, rows in self._sequences(sums):
            correct_rows = correct_one if rows.stop - rows.start == 1 else correct_in_chunks
            parts = (queries[:, rows], keys[:, rows], wanted[:, rows], decays[rows], rates[rows])
            output[rows] = correct_rows(state, *parts).transpose(0, 1)
        return output.flatten(1)

    def _sequences(self, sums: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield the state of each sequence, empty where no token came before, and its rows."""
        batch = self._batch
        for block_id, (start, end), has_state in zip(
            batch.block_ids, pairwise(batch.row_starts), batch.has_state, strict=True
        ):
            state = sums[block_id]
            if not has_state:
                state.zero_()
            yield state, slice(start, end)


def scan_one(state: Tensor, taken: Tensor, write: Tensor, read: Tensor, decay: Tensor) -> Tensor:
    """Carry a state through one row: as `scan_in_chunks`, by the recurrence itself."""
    num_heads, head_dim, state_dim = state.shape
    state.mul_(decay[0].exp()[:, None, None])
    by_group = state.view(write.shape[1], -1, state_dim)
    by_group.addcmul_(taken.view(len(by_group), -1, 1), write[0, :, None])
    return torch.bmm(by_group, read[0, :, :, None]).view(1, num_heads, head_dim)


def scan_in_chunks(state: Tensor, taken: Tensor, writes: Tensor, reads: Tensor, decays: Tensor) -> Tensor:
    """Carry a state through a sequence's rows, `CHUNK_ROWS` at a time, by matrix products.

    What a row reads of the chunk's earlier rows is a causal product, as attention without its softmax; what it reads
    of all before the chunk comes from the state.

    Args:
        state: [H, D, N], changed in place.
        taken: what each row adds, [T, H, D].
        writes, reads: [T, G, N].
        decays: [T, H], the logarithms of what each row leaves of the state.

    Returns:
        What each row reads, [T, H, D].

    Source: Mamba 2, arXiv 2405.21060, section 6.
    """
    num_heads, head_dim, state_dim = state.shape
    num_groups = writes.shape[1]
    by_group = state.view(num_groups, -1, state_dim)
    outputs = []
    for start in range(0, len(taken), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        write, read = writes[rows].transpose(0, 1), reads[rows].transpose(0, 1)  # [G, rows, N]
        added = taken[rows].transpose(0, 1)  # [H, rows, D]
        between, from_start, to_end = _decays_within(decays[rows])
        scores = torch.bmm(read, write.mT)  # [G, rows, rows]
        weights = between.view(num_groups, -1, *scores.shape[1:]).mul_(scores[:, None]).view_as(between)
        carried = torch.bmm(by_group, read.mT).view(num_heads, head_dim, -1).mT  # [H, rows, D]
        # Not in one call: with another sum to add to, a CPU multiplies one head after the other.
        read_out = torch.bmm(weights, added).addcmul_(carried, from_start[:, :, None])
        outputs.append(read_out.transpose(0, 1))
        state.mul_(from_start[:, -1, None, None])
        lasting = (added * to_end[:, :, None]).mT.reshape(num_groups, -1, write.shape[1])  # [G, H / G * D, rows]
        by_group.baddbmm_(lasting, write)
    return torch.cat(outputs)


def correct_one(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """Correct a state by one row: as `correct_in_chunks`, by the rule itself, but reading before the state changes."""
    left = decay[0].exp()[:, None, None]
    found = torch.bmm(torch.cat((key, query), 1), state).mul_(left)  # [H, 2, V]
    change = (value - found[:, :1]).mul_(rate[0][:, None, None])
    state.mul_(left).addcmul_(key.mT, change)
    return torch.addcmul(found[:, 1:], (query * key).sum(-1, keepdim=True), change)


def correct_in_chunks(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
) -> Tensor:
    """Correct a state by a sequence's rows, `CHUNK_ROWS` at a time, by matrix products.

    A row's change depends on those of the chunk's earlier rows, so the changes are the solution of a triangular
    system. What it reads of them is a causal product; all before the chunk comes from the state.

    Args:
        state: [H, K, V], changed in place.
        queries, keys: [H, T, K].
        values: [H, T, V].
        decays, rates: [T, H].

    Returns:
        What each row reads, [H, T, V].

    Source: Gated Delta Networks, arXiv 2412.06464, section 3.3; the state is known when a chunk is solved, so no
        second system is solved for it.
    """
    outputs = []
    for start in range(0, len(decays), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        query, key, rate = queries[:, rows], keys[:, rows], rates[rows].T[:, :, None]
        between, from_start, to_end = _decays_within(decays[rows])
        found = torch.bmm(key, state).mul_(from_start[:, :, None])
        system = torch.bmm(key, key.mT).mul_(between).mul_(rate)
        wanted = (values[:, rows] - found).mul_(rate)
        changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        scores = torch.bmm(query, key.mT).mul_(between)
        # Not in one call: with another sum to add to, a CPU multiplies one head after the other.
        outputs.append(torch.bmm(scores, changes).addcmul_(torch.bmm(query, state), from_start[:, :, None]))
        state.mul_(from_start[:, -1, None, None])
        state += torch.bmm((key * to_end[:, :, None]).mT, changes)
    return torch.cat(outputs, 1)


def _decays_within(decays: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a chunk's rows leave of what came before: from row to row, from the start, and to the end.

    Args:
        decays: [rows, H], logarithms.

    Returns:
        [H, rows, rows], 0 above the diagonal; [H, rows] and [H, rows].
    """
    # Differences of long sums: float64 keeps those of neighbours exact where far ones are large.
    since_start = decays.double().cumsum(0).T
    between = (since_start[:, :, None] - since_start[:, None, :]).float().tril_().exp_().tril_()
    return between, since_start.float().exp_(), (since_start[:, -1:] - since_start).float().exp_()


def _input_rows(batch: StateBatch, num_columns: int) -> tuple[Tensor, Tensor]:
    """Say where a step's convolutions find their inputs, in the kept inputs of all sequences followed by all rows.

    ```
     a sequence   |<-- kept inputs: num_columns -->|<-- rows of this step -->|
     keeps next                             |<-- num_columns, up to the end -->|
    ```

    Returns:
        For each tap, the oldest first, the input of each row, [num_columns + 1, T]; and the inputs that are kept
        next, [S * num_columns].
    """
    starts = torch.tensor(batch.row_starts)
    counts = starts.diff()
    num_seqs = len(counts)
    owners = torch.repeat_interleave(counts)
    offsets = torch.arange(batch.row_starts[-1]) - starts[owners]

    def find(seqs: Tensor, positions: Tensor) -> Tensor:
        """Return where the inputs at `positions` of a sequence's rows are; those before its first row are kept ones."""
        return torch.where(
            positions < 0,
            (seqs + 1) * num_columns + positions,
            num_seqs * num_columns + starts[seqs] + positions,
        )

    backs = torch.arange(num_columns, -1, -1)[:, None]
    seqs = torch.arange(num_seqs)[:, None]
    last = counts[:, None] - torch.arange(num_columns, 0, -1)
    return find(owners, offsets - backs), find(seqs, last).flatten()
