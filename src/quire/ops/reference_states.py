"""The slow twin of recurrence: each state carried from token to token, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface import PagedStates, ScanHeads, StateBatch


class ReferenceStepStates:
    """Recurrence as defined, one sequence after the other and token by token."""

    def __init__(self, batch: StateBatch, states: PagedStates) -> None:
        self._batch = batch
        self._states = states

    def convolve(self, layer_idx: int, x: Tensor, taps: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
        """Multiply each token and those before it by the taps."""
        kernel = len(taps)
        output = torch.empty_like(x)
        for block_id, start, end, has_state in self._sequences():
            kept = self._states.inputs[layer_idx][block_id]
            seen = list(kept if has_state else torch.zeros_like(kept))
            for row in range(start, end):
                seen.append(x[row])
                y = sum(
                    (tap * value.float() for tap, value in zip(taps, seen[-kernel:], strict=True)), taps.new_zeros(())
                )
                if bias is not None:
                    y = y + bias
                output[row] = y * torch.sigmoid(y) if activation else y
            kept.copy_(torch.stack(seen[-(kernel - 1) :]))
        return output

    def scan(self, layer_idx: int, x: Tensor, write: Tensor, read: Tensor, steps: Tensor, heads: ScanHeads) -> Tensor:
        """Forget, take in, read."""
        num_heads, head_dim, state_dim = self._states.sums[layer_idx].shape[1:]
        values = x.float().view(-1, num_heads, head_dim)
        writes, reads = (
            part.float().view(len(x), -1, state_dim).repeat_interleave(num_heads * state_dim // part.shape[1], 1)
            for part in (write, read)
        )
        lengths = functional.softplus(steps.float() + heads.step_biases)
        output = torch.empty_like(values)
        for block_id, start, end, has_state in self._sequences():
            state = self._states.sums[layer_idx][block_id]
            if not has_state:
                state.zero_()
            for row in range(start, end):
                taken = values[row] * lengths[row, :, None]
                state.mul_((lengths[row] * heads.decays).exp()[:, None, None])
                state.add_(torch.einsum("hd,hn->hdn", taken, writes[row]))
                output[row] = torch.einsum("hdn,hn->hd", state, reads[row]) + heads.skips[:, None] * values[row]
        return output.flatten(1)

    def correct(
        self, layer_idx: int, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
    ) -> Tensor:
        """Forget, look the key up, put right what it finds, read."""
        num_heads, key_dim, value_dim = self._states.sums[layer_idx].shape[1:]
        queries, keys = (
            part.view(len(part), -1, key_dim).repeat_interleave(num_heads * key_dim // part.shape[1], 1)
            for part in (queries, keys)
        )
        wanted = values.float().view(-1, num_heads, value_dim)
        output = torch.empty_like(wanted)
        for block_id, start, end, has_state in self._sequences():
            state = self._states.sums[layer_idx][block_id]
            if not has_state:
                state.zero_()
            for row in range(start, end):
                state.mul_(decays[row].exp()[:, None, None])
                found = torch.einsum("hk,hkv->hv", keys[row], state)
                state.add_(torch.einsum("hk,hv->hkv", keys[row], rates[row, :, None] * (wanted[row] - found)))
                output[row] = torch.einsum("hk,hkv->hv", queries[row], state)
        return output.flatten(1)

    def _sequences(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield each sequence's block, its rows, and whether it has a state."""
        batch = self._batch
        for block_id, (start, end), has_state in zip(
            batch.block_ids, pairwise(batch.row_starts), batch.has_state, strict=True
        ):
            yield block_id, start, end, has_state
