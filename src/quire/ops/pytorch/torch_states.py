"""Recurrence over paged states by torch operators."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface.ops import PagedStates, StateBatch
from quire.ops.interface.recurrent_weights import SSMHeads

# Rows of a sequence that are scanned at once. Work grows with the square of the chunk, and chunks are sequential.
CHUNK_ROWS = 64


class TorchStepStates:
    """Recurrence of one step over one cache group.

    Convolutions run over all sequences at once. States are large, so each is updated in place, one sequence after the
    other: a single row by the recurrence itself, more rows in chunks.
    """

    def __init__(self, batch: StateBatch, states: PagedStates) -> None:
        self._batch = batch
        self._states = states
        device = states.conv_states[0].device
        self._block_ids = torch.tensor(batch.block_ids, dtype=torch.int64, device=device)
        fresh = [idx for idx, has_state in enumerate(batch.has_state) if not has_state]
        self._fresh = torch.tensor(fresh, dtype=torch.int64, device=device) if fresh else None
        taps, stored = _input_rows(batch, states.conv_states[0].shape[1])
        self._tap_rows, self._stored_rows = taps.to(device), stored.to(device)

    def causal_conv(
        self, layer_idx: int, x: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, activation: bool
    ) -> Tensor:
        """Gather the inputs of each tap, multiply, add."""
        conv_states = self._states.conv_states[layer_idx]
        history = conv_states.index_select(0, self._block_ids)
        if self._fresh is not None:
            history.index_fill_(0, self._fresh, 0.0)
        rows = torch.cat((history.flatten(0, 1), x))
        conv_states.index_copy_(0, self._block_ids, rows.index_select(0, self._stored_rows).view_as(history))
        rows = rows.float()
        y = rows.index_select(0, self._tap_rows[0]).mul_(conv_weight[0])
        for row_ids, tap in zip(self._tap_rows[1:], conv_weight[1:], strict=True):
            y.addcmul_(rows.index_select(0, row_ids), tap)
        if conv_bias is not None:
            y.add_(conv_bias)
        if activation:
            y = functional.silu(y, inplace=True)
        return y.to(x.dtype)

    def ssm_scan(self, layer_idx: int, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, heads: SSMHeads) -> Tensor:
        """Update each state with its rows."""
        ssm_states = self._states.ssm_states[layer_idx]
        num_heads, head_dim, state_dim = ssm_states.shape[1:]
        dt = functional.softplus(dt.float() + heads.dt_bias)
        dA = dt * heads.A
        x = x.float().view(-1, num_heads, head_dim)
        dtx = x * dt[:, :, None]
        B, C = (part.float().view(len(x), -1, state_dim) for part in (B, C))
        output = x * heads.D[:, None]
        for state, rows in self._sequences(ssm_states):
            scan_rows = scan_one if rows.stop - rows.start == 1 else scan_in_chunks
            output[rows] += scan_rows(state, dtx[rows], B[rows], C[rows], dA[rows])
        return output.flatten(1)

    def gated_delta_rule(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Update each state with its rows."""
        ssm_states = self._states.ssm_states[layer_idx]
        num_heads, key_dim, value_dim = ssm_states.shape[1:]
        share = num_heads * key_dim // k.shape[1]
        q, k = (part.view(len(part), -1, key_dim).repeat_interleave(share, 1).transpose(0, 1) for part in (q, k))
        output = v.new_empty(len(v), num_heads, value_dim, dtype=torch.float32)
        v = v.float().view(-1, num_heads, value_dim).transpose(0, 1)
        for state, rows in self._sequences(ssm_states):
            update = delta_rule_one if rows.stop - rows.start == 1 else delta_rule_in_chunks
            output[rows] = update(state, q[:, rows], k[:, rows], v[:, rows], g[rows], beta[rows]).transpose(0, 1)
        return output.flatten(1)

    def _sequences(self, ssm_states: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield the state of each sequence, zeroed if the sequence begins in this step, and its rows."""
        batch = self._batch
        for block_id, (start, end), has_state in zip(
            batch.block_ids, pairwise(batch.row_starts), batch.has_state, strict=True
        ):
            state = ssm_states[block_id]
            if not has_state:
                state.zero_()
            yield state, slice(start, end)


def scan_one(state: Tensor, dtx: Tensor, B: Tensor, C: Tensor, dA: Tensor) -> Tensor:
    """Update a state with one row: as `scan_in_chunks`, by the recurrence itself."""
    num_heads, head_dim, state_dim = state.shape
    state.mul_(dA[0].exp()[:, None, None])
    by_group = state.view(B.shape[1], -1, state_dim)
    by_group.addcmul_(dtx.view(len(by_group), -1, 1), B[0, :, None])
    return torch.bmm(by_group, C[0, :, :, None]).view(1, num_heads, head_dim)


def scan_in_chunks(state: Tensor, dtx: Tensor, B: Tensor, C: Tensor, dA: Tensor) -> Tensor:
    """Update a state with a sequence's rows, `CHUNK_ROWS` at a time, by matmuls.

    The contribution of earlier rows of the chunk is a causal product, like attention without its softmax; the
    contribution of all rows before the chunk comes from the state.

    Source: Mamba 2, arXiv 2405.21060, section 6.
    """
    num_heads, head_dim, state_dim = state.shape
    num_groups = B.shape[1]
    by_group = state.view(num_groups, -1, state_dim)
    outputs = []
    for start in range(0, len(dtx), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        chunk_B, chunk_C = B[rows].transpose(0, 1), C[rows].transpose(0, 1)  # [G, rows, N]
        added = dtx[rows].transpose(0, 1)  # [H, rows, D]
        between, from_start, to_end = _decays_within(dA[rows])
        scores = torch.bmm(chunk_C, chunk_B.mT)  # [G, rows, rows]
        weights = between.view(num_groups, -1, *scores.shape[1:]).mul_(scores[:, None]).view_as(between)
        from_state = torch.bmm(by_group, chunk_C.mT).view(num_heads, head_dim, -1).mT  # [H, rows, D]
        # Two calls: with another sum to add to, torch multiplies one head after the other on a CPU.
        output = torch.bmm(weights, added).addcmul_(from_state, from_start[:, :, None])
        outputs.append(output.transpose(0, 1))
        state.mul_(from_start[:, -1, None, None])
        decayed = (added * to_end[:, :, None]).mT.reshape(num_groups, -1, chunk_B.shape[1])  # [G, H / G * D, rows]
        by_group.baddbmm_(decayed, chunk_B)
    return torch.cat(outputs)


def delta_rule_one(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Update a state with one row: as `delta_rule_in_chunks`, but reading before the state changes."""
    decay = g[0].exp()[:, None, None]
    reads = torch.bmm(torch.cat((k, q), 1), state).mul_(decay)  # [H, 2, V]
    delta = (v - reads[:, :1]).mul_(beta[0][:, None, None])
    state.mul_(decay).addcmul_(k.mT, delta)
    return torch.addcmul(reads[:, 1:], (q * k).sum(-1, keepdim=True), delta)


def delta_rule_in_chunks(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Update a state with a sequence's rows, `CHUNK_ROWS` at a time, by matmuls.

    The delta of a row depends on the deltas of earlier rows of the chunk, so the deltas solve a triangular system.
    Their contribution is a causal product; the contribution of all rows before the chunk comes from the state.

    Source: Gated Delta Networks, arXiv 2412.06464, section 3.3; the state is known when a chunk is solved, so no
        second system is solved for it.
    """
    outputs = []
    for start in range(0, len(g), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        chunk_q, chunk_k, rate = q[:, rows], k[:, rows], beta[rows].T[:, :, None]
        between, from_start, to_end = _decays_within(g[rows])
        expected = torch.bmm(chunk_k, state).mul_(from_start[:, :, None])
        system = torch.bmm(chunk_k, chunk_k.mT).mul_(between).mul_(rate)
        target = (v[:, rows] - expected).mul_(rate)
        deltas = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        scores = torch.bmm(chunk_q, chunk_k.mT).mul_(between)
        # Two calls: with another sum to add to, torch multiplies one head after the other on a CPU.
        outputs.append(torch.bmm(scores, deltas).addcmul_(torch.bmm(chunk_q, state), from_start[:, :, None]))
        state.mul_(from_start[:, -1, None, None])
        state += torch.bmm((chunk_k * to_end[:, :, None]).mT, deltas)
    return torch.cat(outputs, 1)


def _decays_within(log_decays: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decays within a chunk: from row to row, from its start to each row, and from each row to its end.

    Args:
        log_decays: [rows, H].
    """
    # Differences of long sums: with float64, differences of neighbouring rows stay exact even if the sums are large.
    since_start = log_decays.double().cumsum(0).T
    between = (since_start[:, :, None] - since_start[:, None, :]).float().tril_().exp_().tril_()
    return between, since_start.float().exp_(), (since_start[:, -1:] - since_start).float().exp_()


def _input_rows(batch: StateBatch, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a convolution's inputs: the stored inputs of all sequences, followed by all rows.

    ```
     a sequence   |<-- stored inputs: num_columns -->|<-- rows of this step -->|
     stored next                              |<-- num_columns, up to the end -->|
    ```

    Returns:
        For each tap, the oldest first, the input of each row, [num_columns + 1, T]; and the inputs that are stored
        next, [S * num_columns].
    """
    starts = torch.tensor(batch.row_starts)
    counts = starts.diff()
    num_seqs = len(counts)
    owners = torch.repeat_interleave(counts)
    offsets = torch.arange(batch.row_starts[-1]) - starts[owners]

    def find(seqs: Tensor, positions: Tensor) -> Tensor:
        """Return the rows of the inputs at `positions` of sequences; negative positions are stored inputs."""
        return torch.where(
            positions < 0,
            (seqs + 1) * num_columns + positions,
            num_seqs * num_columns + starts[seqs] + positions,
        )

    backs = torch.arange(num_columns, -1, -1)[:, None]
    seqs = torch.arange(num_seqs)[:, None]
    last = counts[:, None] - torch.arange(num_columns, 0, -1)
    return find(owners, offsets - backs), find(seqs, last).flatten()
