"""The slow twin of recurrence: each state updated token by token, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface.ops import PagedStates, StateBatch
from quire.ops.interface.recurrent_weights import SSMHeads


class ReferenceStepStates:
    """Recurrence by its definition, one sequence after the other and token by token."""

    def __init__(self, batch: StateBatch, states: PagedStates) -> None:
        self._batch = batch
        self._states = states

    def causal_conv(
        self, layer_idx: int, x: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, activation: bool
    ) -> Tensor:
        """Multiply each token and those before it by the taps."""
        kernel = len(conv_weight)
        output = torch.empty_like(x)
        for block_id, start, end, has_state in self._sequences():
            conv_state = self._states.conv_states[layer_idx][block_id]
            inputs = list(conv_state if has_state else torch.zeros_like(conv_state))
            for row in range(start, end):
                inputs.append(x[row])
                products = (tap * value.float() for tap, value in zip(conv_weight, inputs[-kernel:], strict=True))
                y = sum(products, conv_weight.new_zeros(()))
                if conv_bias is not None:
                    y = y + conv_bias
                output[row] = y * torch.sigmoid(y) if activation else y
            conv_state.copy_(torch.stack(inputs[-(kernel - 1) :]))
        return output

    def ssm_scan(self, layer_idx: int, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, heads: SSMHeads) -> Tensor:
        """Decay, add, read."""
        num_heads, head_dim, state_dim = self._states.ssm_states[layer_idx].shape[1:]
        x = x.float().view(-1, num_heads, head_dim)
        B, C = (
            part.float().view(len(x), -1, state_dim).repeat_interleave(num_heads * state_dim // part.shape[1], 1)
            for part in (B, C)
        )
        dt = functional.softplus(dt.float() + heads.dt_bias)
        output = torch.empty_like(x)
        for block_id, start, end, has_state in self._sequences():
            state = self._states.ssm_states[layer_idx][block_id]
            if not has_state:
                state.zero_()
            for row in range(start, end):
                state.mul_((dt[row] * heads.A).exp()[:, None, None])
                state.add_(torch.einsum("hd,hn->hdn", x[row] * dt[row, :, None], B[row]))
                output[row] = torch.einsum("hdn,hn->hd", state, C[row]) + heads.D[:, None] * x[row]
        return output.flatten(1)

    def gated_delta_rule(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Decay, look the key up, correct its value, read."""
        num_heads, key_dim, value_dim = self._states.ssm_states[layer_idx].shape[1:]
        q, k = (
            part.view(len(part), -1, key_dim).repeat_interleave(num_heads * key_dim // part.shape[1], 1)
            for part in (q, k)
        )
        v = v.float().view(-1, num_heads, value_dim)
        output = torch.empty_like(v)
        for block_id, start, end, has_state in self._sequences():
            state = self._states.ssm_states[layer_idx][block_id]
            if not has_state:
                state.zero_()
            for row in range(start, end):
                state.mul_(g[row].exp()[:, None, None])
                expected = torch.einsum("hk,hkv->hv", k[row], state)
                state.add_(torch.einsum("hk,hv->hkv", k[row], beta[row, :, None] * (v[row] - expected)))
                output[row] = torch.einsum("hk,hkv->hv", q[row], state)
        return output.flatten(1)

    def _sequences(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield each sequence's block, its rows, and whether it has a state."""
        batch = self._batch
        for block_id, (start, end), has_state in zip(
            batch.block_ids, pairwise(batch.row_starts), batch.has_state, strict=True
        ):
            yield block_id, start, end, has_state
